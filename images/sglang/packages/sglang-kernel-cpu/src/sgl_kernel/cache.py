"""Bookkeeping around speculation: which cache slots belong to whom, moving rows, shifting token ids.

`req_to_token` [R, P] maps (request row, position) to a cache slot; `req_pool_indices` [B] names the rows of this batch.
Functions write into the argument that their docstring names and return nothing unless said otherwise. `pool_len` is P;
the real kernels need it because they work on raw memory.
"""
# ruff: noqa: ARG001 (the caller dictates the signatures)

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Write `req_to_token[row, start:end]` of each request from consecutive pieces of `out_cache_loc`."""
    for row, positions, piece in _pieces(req_pool_indices, start, end):
        req_to_token[row, positions] = out_cache_loc[piece].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """The reverse: write consecutive pieces of `out_cache_loc` from `req_to_token[row, start:end]`."""
    for row, positions, piece in _pieces(req_pool_indices, start, end):
        out_cache_loc[piece] = req_to_token[row, positions].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Write `out_cache_loc` [B * topk * num_steps]: the slots that follow each request's `seq_lens[i]` positions."""
    width = topk * num_steps
    locations = out_cache_loc.view(-1, width)
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        locations[i] = req_to_token[row, length : length + width].to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """Return a slot table [B * topk, pool_len] in which every branch of a draft is a sequence of its own.

    Row b * topk + t: the request's prefix, then the `num_steps` slots of branch t (branches lie one after the other).
    """
    table = torch.zeros(len(seq_lens) * topk, pool_len, dtype=req_to_token.dtype)
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        branches = table[b * topk : (b + 1) * topk]
        branches[:, :length] = req_to_token[row, :length]
        drafts = req_to_token[row, length : length + topk * num_steps]
        branches[:, length : length + num_steps] = drafts.view(topk, num_steps)
    return table


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """In every buffer copy rows `src_loc` to rows `tgt_loc`, as if all were read before any is written.

    `data_ptrs` holds the addresses of the buffers and `strides` the bytes per row; nothing can check that rows exist.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + target * stride, row, stride)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Write `bonus_tokens` [B]: the last accepted token of each request in `accept_tokens` [B * accept_stride].

    `accept_lens` counts the bonus token, so the last one lies at `accept_lens - 1`.
    """
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Write `accept_out_cache_loc`: the slots of the accepted tokens, packed; -1 in `accept_index` is not accepted."""
    accepted = accept_index.flatten()
    slots = out_cache_loc[accepted[accepted != -1].long()]
    accept_out_cache_loc[: len(slots)] = slots


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """In `input_ids` shift each request left by one and write its new token at the end, or at `select_index[i]`."""
    new_tokens = topk_index.flatten().tolist()
    for i, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if length == 0:
            continue
        end = start + length
        input_ids[start : end - 1] = input_ids[start + 1 : end].clone()
        input_ids[end - 1 if select_index is None else int(select_index[i])] = new_tokens[i]


def _pieces(rows: Tensor, start: Tensor, end: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Each request's row and positions, and its piece of a packed array."""
    at = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        yield row, slice(first, last), slice(at, at + last - first)
        at += last - first

"""Attention over the paged KV cache, one request at a time.

Both operations are registered as `torch.ops.sgl_kernel.*`, in the argument order of SGLang's `intel_amx` backend.
Shapes: B requests, T tokens of all requests together, Hq query and Hk key heads (Hq a multiple of Hk), S cache slots.
A slot is one row of `k_buffer` [S, Hk, D] and `v_buffer` [S, Hk, Dv]; `req_to_token[r, p]` is the slot of request row r
at position p, and `req_pool_indices` [B] names the rows of this batch.
"""
# ruff: noqa: ARG001 (the caller dictates the signatures)

from __future__ import annotations

import torch
from torch import Tensor

_SCHEMAS = {
    "decode_attention_cpu": (
        "(Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale, Tensor(c!) output, "
        "Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token, Tensor req_pool_indices, "
        "Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size, "
        "Tensor? encoder_lens, Tensor? sinks) -> ()"
    ),
    "extend_attention_cpu": (
        "(Tensor query, Tensor? key, Tensor? value, Tensor(a!) output, Tensor k_buffer, Tensor v_buffer, "
        "float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
        "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap, "
        "bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, "
        "bool is_causal) -> ()"
    ),
}


def decode_attention_cpu(
    query: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One new token per request: store its K and V at `loc`, then attend to the first `seq_lens[i]` positions.

    `query` [B, Hq, D], `output` [B, Hq, Dv] (written), `key` and `value` [B, Hk, D or Dv], None when already stored.
    `attn_logits` is scratch space of the real kernel and is not used. Raises NotImplementedError for what is not here.
    """
    _refuse("decode", is_cross_attn, sliding_window_size, sinks, k_scale, v_scale)
    if key is not None and value is not None:
        k_buffer[loc] = key.reshape(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = value.reshape(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length].long()
        output[i] = _attend(query[i : i + 1], k_buffer[slots], v_buffer[slots], sm_scale, logit_cap, None)[0]


def extend_attention_cpu(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    output: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """The last `extend_seq_lens[i]` of `seq_lens[i]` positions attend to the whole sequence: prefill and verification.

    `query` [T, Hq, D] and `output` [T, Hq, Dv] (written) hold request i from row `extend_start_loc[i]` on. `key` and
    `value` are not read: SGLang has stored them in the cache before the call. What the extension sees of itself:
    `tree_mask`, a flat [B, E, E] bool (all requests extend by the same E draft tokens), else causal, else everything.
    Raises NotImplementedError for what is not here.
    """
    _refuse("extend", is_cross_attn, sliding_window_size, sinks, k_scale, v_scale)
    columns = (req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc)
    for i, (row, length, extend, start) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        slots = req_to_token[row, :length].long()
        mask = None
        if tree_mask is not None:
            mask = torch.ones(extend, length, dtype=torch.bool)
            mask[:, length - extend :] = tree_mask.reshape(-1, extend, extend)[i]
        elif is_causal:
            mask = torch.ones(extend, length, dtype=torch.bool).tril(length - extend)
        rows = slice(start, start + extend)
        output[rows] = _attend(query[rows], k_buffer[slots], v_buffer[slots], sm_scale, logit_cap, mask)


def _attend(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, logit_cap: float, mask: Tensor | None) -> Tensor:
    """Softmax in float32: q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv], mask [Tq, Tk] (True sees) -> [Tq, Hq, Dv]."""
    group = q.shape[1] // k.shape[1]
    qh, kh, vh = (x.float().transpose(0, 1) for x in (q, k, v))
    if group > 1:
        kh, vh = kh.repeat_interleave(group, 0), vh.repeat_interleave(group, 0)
    scores = qh @ kh.transpose(1, 2) * sm_scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ vh).transpose(0, 1).to(q.dtype)


def _refuse(
    name: str, is_cross_attn: bool, sliding_window_size: int, sinks: Tensor | None, k_scale: float, v_scale: float
) -> None:
    asked = [
        what
        for what, wanted in (
            ("cross attention", is_cross_attn),
            (f"a sliding window of {sliding_window_size}", sliding_window_size > 0),
            ("attention sinks", sinks is not None),
            ("a scaled KV cache", (k_scale, v_scale) != (1.0, 1.0)),
        )
        if wanted
    ]
    if asked:
        raise NotImplementedError(
            f"sglang-kernel-cpu {name} attention: the model asks for {', '.join(asked)}; "
            "this stand-in has full causal attention over an unscaled cache only. Use a dense model without them."
        )


_library = torch.library.Library("sgl_kernel", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)
    _library.impl(_name, globals()[_name], "CompositeExplicitAutograd")

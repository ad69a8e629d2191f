"""The draft tree of EAGLE: build it from the drafts' choices, verify it greedily against the target.

Every request has a tree of N nodes: node 0 is the last accepted token, nodes 1..N-1 are the chosen drafts in the order
of `selected_index`. Links are first child and next sibling; -1 means none. Children are linked in ascending order.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FULL_MASK, _QLEN_ONLY = 0, 1  # SGLang's TreeMaskMode; mode 2 (bit packing) is for GPUs


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill mask, positions and links of B trees with N = `draft_token_num` nodes each.

    `selected_index` [B, N-1]: numbers of the chosen drafts in drafting order. Draft s was proposed by group s // topk;
    group 0 hangs on the root, group g on the draft number `parent_list[b, g]`. `seq_lens` [B]: lengths without drafts.
    Written: `positions` [B*N] (length + depth of the node); `retrive_index` [B, N] (row of each node in the batch);
    `retrive_next_token` and `retrive_next_sibling` [B, N], which must come filled with -1; `tree_mask`, flat, who sees
    whom, per request [N, length + N] (mode 0) or [N, N] (mode 1). A node sees itself, its ancestors and the root.
    A draft whose parent was not chosen (possible when scores tie) stays unlinked.
    Raises NotImplementedError for mode 2.
    """
    mode, n = int(tree_mask_mode), draft_token_num
    if mode not in (_FULL_MASK, _QLEN_ONLY):
        raise NotImplementedError(
            f"sglang-kernel-cpu: tree mask mode {mode} (bit packing) is not in the stand-in; modes 0 and 1 are."
        )
    flat_mask, flat_positions = tree_mask.view(-1), positions.view(-1)
    offset = 0
    for b, length in enumerate(seq_lens.tolist()):
        parents = _parents(parent_list[b].tolist(), selected_index[b].tolist(), topk)
        _link(parents, retrive_next_token[b], retrive_next_sibling[b])
        retrive_index[b] = torch.arange(b * n, (b + 1) * n)
        prefix = length if mode == _FULL_MASK else 0
        rows = torch.zeros(n, prefix + n, dtype=torch.bool)
        rows[:, :prefix] = True
        for node in range(n):
            path = _ancestors(parents, node, depth)
            flat_positions[b * n + node] = length + len(path)
            rows[node, [prefix, prefix + node, *(prefix + p for p in path)]] = True
        flat_mask[offset : offset + rows.numel()] = rows.flatten().to(tree_mask.dtype)
        offset += rows.numel()


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree from the root along the target's own greedy tokens.

    `candidates` [B, N]: tokens of the nodes. `target_predict` [B, N]: what the target says after each node.
    Written: `accept_index` [B, K], rows of the accepted nodes, root first (at most K); `accept_token_num` [B], accepted
    drafts without the root; `predicts` [B*N], the target's token at every accepted row, the last being the bonus token.
    """
    target = target_predict.flatten().tolist()
    columns = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    for b, (tokens, rows, child, sibling) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        node, path = 0, [rows[0]]
        while len(path) < accept_index.shape[1]:
            wanted = target[path[-1]]
            node = child[node]
            while node != -1 and tokens[node] != wanted:
                node = sibling[node]
            if node == -1:
                break
            path.append(rows[node])
        accept_index[b, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[b] = len(path) - 1
        predicts[path] = torch.tensor([target[row] for row in path], dtype=predicts.dtype)


def _parents(group_parents: list[int], selected: list[int], topk: int) -> list[int | None]:
    """Parent node of each node; None for the root and for a draft whose parent was not chosen."""
    node_of = {draft: i + 1 for i, draft in enumerate(selected)}
    groups = (draft // topk for draft in selected)
    return [None, *(0 if group == 0 else node_of.get(group_parents[group]) for group in groups)]


def _link(parents: list[int | None], next_token: Tensor, next_sibling: Tensor) -> None:
    youngest: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent is None:
            continue
        if parent in youngest:
            next_sibling[youngest[parent]] = node
        else:
            next_token[parent] = node
        youngest[parent] = node


def _ancestors(parents: list[int | None], node: int, depth: int) -> list[int]:
    """The path from `node` up to, not including, the root; at most `depth` long."""
    path: list[int] = []
    step: int | None = node
    while step and len(path) < depth:
        path.append(step)
        step = parents[step]
    return path

"""Multi-item scoring: every candidate of every user in one pass over token trees.

score(item) = sum over its SID tokens of log p(token | prompt, tokens before). Prefixes that
candidates share are forwarded once and the last token of a candidate is not forwarded
(engine/token_tree.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.backend import Backend, Context, NodeBatch, Targets
from engine.device_trie import DeviceTrie
from engine.token_tree import TokenTree, TreeLevel, build_token_tree, candidate_parts
from schemas.requests import Ints, Ragged, place_within


def score_in_parts(
    backend: Backend, context: Context, index: DeviceTrie, candidates: Ragged, max_rows: int
) -> tuple[Tensor, Ints]:
    """Scores of the candidates, in their order, float32 `[M]`; and the nodes forwarded per user
    `[U]`.

    However many candidates a user has, at most `max_rows` nodes are kept at a time: parts of a
    candidate set hang from the one prefill, one after another, and are forgotten when they are
    read.
    """
    tree = build_token_tree(index.trie, candidates)
    if tree.num_rows <= max_rows:
        return score_items(backend, context, index, tree, max_rows), tree.rows_per_user
    scores = torch.empty(len(candidates.values), dtype=torch.float32, device=index.device)
    rows = np.zeros(candidates.num_rows, dtype=np.int64)
    user = candidates.row_ids
    for part in candidate_parts(index.trie, candidates, max_rows):
        lengths = np.bincount(user[part], minlength=candidates.num_rows)
        tree = build_token_tree(index.trie, Ragged.from_lengths(lengths, candidates.values[part]))
        before = context.num_rows
        scores[_put(part, index)] = score_items(backend, context, index, tree, max_rows)
        context.rewind(before)
        rows += tree.rows_per_user
    return scores, rows


def score_items(
    backend: Backend, context: Context, index: DeviceTrie, tree: TokenTree, max_rows: int
) -> Tensor:
    """Scores of the candidates the tree was built from, in their order, float32 `[M]`, nats.

    Appends the tree's inner nodes to the context, at most `max_rows` in one pass of the model.
    """
    first_row = context.num_rows
    starts = _level_starts(tree) + first_row
    for nodes in _node_batches(tree, index, starts, max_rows):
        backend.extend(context, nodes)

    scores: list[Tensor] = []
    for depth, level in enumerate(tree.levels):
        log_probs = _read_level(backend, context, index, tree, depth, starts)
        if depth:
            log_probs = scores[-1][_put(level.parent, index)] + log_probs
        scores.append(log_probs)
    return _gather_leaves(tree, scores, index)


def _put(array: Ints, index: DeviceTrie) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(index.device)


def _level_starts(tree: TokenTree) -> Ints:
    """Number of forwarded nodes before each level `[L + 1]`."""
    counts = [int(level.forwarded.sum()) for level in tree.levels]
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _parent_rows(tree: TokenTree, depth: int, starts: Ints) -> Ints:
    """Context row of each node's parent `[n]`."""
    level = tree.levels[depth]
    if depth == 0:
        return level.user
    rows: Ints = starts[depth - 1] + tree.levels[depth - 1].forward_index[level.parent]
    return rows


def _node_batches(
    tree: TokenTree, index: DeviceTrie, starts: Ints, max_rows: int
) -> list[NodeBatch]:
    """The tree's forwarded nodes, level after level, cut into passes of at most `max_rows`."""
    user, node, parent, depth = [], [], [], []
    for d, level in enumerate(tree.levels):
        keep = level.forwarded
        user.append(level.user[keep])
        node.append(level.node[keep])
        parent.append(_parent_rows(tree, d, starts)[keep])
        depth.append(np.full(int(keep.sum()), d + 1, dtype=np.int64))
    users, nodes = np.concatenate(user), np.concatenate(node)
    parents, depths = np.concatenate(parent), np.concatenate(depth)
    batches = []
    for begin in range(0, len(users), max_rows):
        part = slice(begin, begin + max_rows)
        slot = place_within(users[part])
        batches.append(
            NodeBatch(
                prompt=_put(users[part], index),
                parent=_put(parents[part], index),
                token=index.token[_put(nodes[part], index)],
                depth=_put(depths[part], index),
                slot=_put(slot, index),
                num_slots=int(slot.max()) + 1,
                max_depth=int(depths[part].max()),
            )
        )
    return batches


def _read_level(
    backend: Backend, context: Context, index: DeviceTrie, tree: TokenTree, depth: int, starts: Ints
) -> Tensor:
    """log p of each node of one level at its parent `[n]`."""
    level = tree.levels[depth]
    if not len(level.node):
        return torch.empty(0, dtype=torch.float32, device=index.device)
    rows, row_of_node = np.unique(_parent_rows(tree, depth, starts), return_inverse=True)
    norm = index.norms[depth]
    if norm.kind == "trie":
        targets, wanted = _all_children(index, level, depth, row_of_node)
    else:
        targets = Targets(
            row=_put(row_of_node, index),
            column=index.code[_put(level.node, index)],
            columns=index.columns[depth],
        )
        wanted = None
    log_probs = backend.log_probs(context, _put(rows, index), targets, norm)
    return log_probs if wanted is None else log_probs[_put(wanted, index)]


def _all_children(
    index: DeviceTrie, level: TreeLevel, depth: int, row_of_node: Ints
) -> tuple[Targets, Ints]:
    """Targets: every child in the catalog of every parent row; and where the level's nodes are in
    them.
    """
    trie = index.trie
    _, first_of_row = np.unique(row_of_node, return_index=True)
    parent = trie.parent[level.node[first_of_row]].astype(np.int64)  # trie node behind each row
    counts = trie.num_children[parent].astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    row = np.repeat(np.arange(len(parent)), counts)
    child = np.repeat(trie.first_child[parent] - offsets[:-1], counts) + np.arange(offsets[-1])
    wanted = offsets[row_of_node] + level.node - trie.first_child[trie.parent[level.node]]
    targets = Targets(
        row=_put(row, index), column=index.code[_put(child, index)], columns=index.columns[depth]
    )
    return targets, wanted.astype(np.int64)


def _gather_leaves(tree: TokenTree, scores: list[Tensor], index: DeviceTrie) -> Tensor:
    begin = np.concatenate([[0], np.cumsum([len(s) for s in scores])]).astype(np.int64)
    return torch.cat(scores)[_put(begin[tree.leaf_level] + tree.leaf_position, index)]

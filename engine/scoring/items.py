"""Multi-item scoring: every candidate of every user in one pass over token trees.

score(item) = sum over its SID tokens of log p(token | prompt, tokens before). Prefixes that
candidates share are forwarded once and the last token of a candidate is not forwarded
(engine/trees/token_tree.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.backend import NodeBatch, Targets
from engine.decoding import Decoding
from engine.trees.device_trie import DeviceTrie
from engine.trees.token_tree import TokenTree, TreeLevel, build_token_tree, candidate_parts
from schemas.requests import Ints, Ragged, place_within
from schemas.settings import LengthNorm


def score_in_parts(
    decoding: Decoding,
    candidates: Ragged,
    max_rows: int,
    *,
    tree: TokenTree | None = None,
    length_norm: LengthNorm = "sum",
) -> tuple[Tensor, Ints]:
    """Scores of the candidates, in their order, float32 `[M]`; and the nodes forwarded per user
    `[U]`.

    However many candidates a user has, at most `max_rows` nodes are kept at a time: parts of a
    candidate set hang from the one prefill, one after another, and are forgotten when they are
    read.

    Args:
        tree: of these candidates, where the caller has it already.
        length_norm: `mean` divides a score by the number of the candidate's tokens.
    """
    index = decoding.index
    if tree is None:
        tree = build_token_tree(index.trie, candidates)
    if tree.num_rows <= max_rows:
        scores, rows = score_items(decoding, tree, max_rows), tree.rows_per_user
    else:
        scores = torch.empty(len(candidates.values), dtype=torch.float32, device=index.device)
        rows = np.zeros(candidates.num_rows, dtype=np.int64)
        for part, tree_part in tree_parts(index, candidates, max_rows):
            with decoding.temporary():
                scores[index.put(part)] = score_items(decoding, tree_part, max_rows)
            rows += tree_part.rows_per_user
    if length_norm == "mean":
        leaf = index.trie.node_of_sid[index.trie.sid_of_item[candidates.values]]
        scores = scores / index.put(index.trie.depth_of_node[leaf].astype(np.int64))
    return scores, rows


def tree_parts(
    index: DeviceTrie,
    candidates: Ragged,
    max_rows: int,
    *,
    forward_leaves: bool = False,
    more: int = 0,
) -> Iterator[tuple[Ints, TokenTree]]:
    """Parts of large candidate sets: positions in `candidates.values`, and their trees."""
    user = candidates.row_ids
    for part in candidate_parts(index.trie, candidates, max_rows, more):
        lengths = np.bincount(user[part], minlength=candidates.num_rows)
        some = Ragged.from_lengths(lengths, candidates.values[part])
        yield part, build_token_tree(index.trie, some, forward_leaves=forward_leaves)


def score_items(decoding: Decoding, tree: TokenTree, max_rows: int) -> Tensor:
    """Scores of the candidates the tree was built from, in their order, float32 `[M]`, nats.

    Appends the tree's inner nodes to the context, at most `max_rows` in one pass of the model.
    """
    index = decoding.index
    starts = forward_tree(decoding, tree, max_rows)
    log_probs: list[Tensor] = []
    while len(log_probs) < len(tree.levels):
        log_probs += _read_levels(decoding, tree, len(log_probs), starts)
    scores: list[Tensor] = []
    for level, log_prob in zip(tree.levels, log_probs, strict=True):
        scores.append(scores[-1][index.put(level.parent)] + log_prob if scores else log_prob)
    return _gather_leaves(tree, scores, index)


def forward_tree(decoding: Decoding, tree: TokenTree, max_rows: int) -> Ints:
    """Append the tree's forwarded nodes, level after level, at most `max_rows` in one pass.

    Returns the context row that the forwarded nodes of each level begin at `[L + 1]`.
    """
    starts = _level_starts(tree) + decoding.context.num_rows
    for nodes in _node_batches(tree, decoding.index, starts, max_rows):
        decoding.extend(nodes)
    return starts


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
                prompt=index.put(users[part]),
                parent=index.put(parents[part]),
                token=index.token[index.put(nodes[part])],
                depth=index.put(depths[part]),
                slot=index.put(slot),
                num_slots=int(slot.max()) + 1,
                max_depth=int(depths[part].max()),
            )
        )
    return batches


def _read_levels(decoding: Decoding, tree: TokenTree, first: int, starts: Ints) -> list[Tensor]:
    """log p of each node at its parent `[n]`, for level `first` and those read along with it.

    Levels whose tokens come from one set are read in one call.
    """
    index = decoding.index
    norm, columns = index.norms[first], index.columns[first]
    last = first + 1
    while norm.kind in ("full_vocab", "sid_range") and index.columns[last : last + 1] == (columns,):
        last += 1
    levels = tree.levels[first:last]
    sizes = [len(level.node) for level in levels]
    if not sum(sizes):
        return [torch.empty(0, dtype=torch.float32, device=index.device) for _ in levels]
    parents = np.concatenate([_parent_rows(tree, d, starts) for d in range(first, last)])
    rows, row_of_node = np.unique(parents, return_inverse=True)
    if norm.kind == "trie":
        targets, wanted = _all_children(index, levels[0], first, row_of_node)
        log_probs = decoding.log_probs(index.put(rows), targets, norm)
        return [log_probs[index.put(wanted)]]
    nodes = np.concatenate([level.node for level in levels])
    targets = Targets(
        row=index.put(row_of_node), column=index.code[index.put(nodes)], columns=columns
    )
    log_probs = decoding.log_probs(index.put(rows), targets, norm)
    return list(torch.split(log_probs, sizes))


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
        row=index.put(row), column=index.code[index.put(child)], columns=index.columns[depth]
    )
    return targets, wanted.astype(np.int64)


def _gather_leaves(tree: TokenTree, scores: list[Tensor], index: DeviceTrie) -> Tensor:
    begin = np.concatenate([[0], np.cumsum([len(s) for s in scores])]).astype(np.int64)
    return torch.cat(scores)[index.put(begin[tree.leaf_level] + tree.leaf_position)]

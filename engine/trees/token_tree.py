"""Candidate sets as token trees: a prefix shared by candidates is one node, forwarded once.

For every user of a batch, the candidates' SIDs are merged into the sub-trie of the catalog they
span. Nodes that have a child in that sub-trie are forwarded; the last token of a candidate never
is (unless a caller reads behind it), only its log-probability is read, at its parent. Pure NumPy on
the host, one pass per level for the whole batch; the tree of a set that many users share is built
once and repeated by `repeat_trees`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.trees.sid_trie import SidTrie
from schemas.requests import Ints, Ragged


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """The nodes of one depth, of all users, ordered by user and then by trie node.

    `forward_index[i]` numbers the nodes that are forwarded, 0.. inside this level, -1 for the
    others.
    """

    user: Ints  # [n]
    node: Ints  # [n] node of the catalog's trie
    parent: Ints  # [n] position in the level above; for depth 1 the user itself
    forward_index: Ints  # [n]

    @property
    def forwarded(self) -> NDArray[np.bool_]:
        """Which nodes go through the model `[n]`."""
        return self.forward_index >= 0


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Token trees of a batch of users. `levels[d]` holds the nodes of depth d + 1."""

    levels: tuple[TreeLevel, ...]
    leaf_level: Ints  # [M] for each candidate: the level its leaf is in …
    leaf_position: Ints  # [M] … and where in it
    rows_per_user: Ints  # [U] nodes that are forwarded

    @property
    def num_rows(self) -> int:
        """Nodes forwarded for the whole batch."""
        return int(self.rows_per_user.sum())


def build_token_tree(
    trie: SidTrie, candidates: Ragged, *, forward_leaves: bool = False
) -> TokenTree:
    """The token trees of the users' candidate sets (catalog items).

    Args:
        forward_leaves: forward candidates' last tokens too, for what is read behind them.
    """
    num_users = candidates.num_rows
    user = candidates.row_ids
    leaf = trie.node_of_sid[trie.sid_of_item[candidates.values]].astype(np.int64)
    leaf_depth = trie.depth_of_node[leaf].astype(np.int64)
    key_of = _Keys(trie.num_nodes)

    # Bottom up: the distinct (user, node) pairs of a depth: its leaves, and the parents of below.
    keys: list[Ints] = [np.empty(0, dtype=np.int64)] * (trie.depth + 1)
    above = np.empty(0, dtype=np.int64)
    for depth in range(trie.depth, 0, -1):
        here = leaf_depth == depth
        keys[depth] = _distinct(np.concatenate([key_of.pack(user[here], leaf[here]), above]))
        users, nodes = key_of.unpack(keys[depth])
        above = key_of.pack(users, trie.parent[nodes].astype(np.int64))

    position = np.empty(len(user), dtype=np.int64)
    for depth in range(1, trie.depth + 1):
        here = leaf_depth == depth
        position[here] = np.searchsorted(keys[depth], key_of.pack(user[here], leaf[here]))

    levels: list[TreeLevel] = []
    parent, _ = key_of.unpack(keys[1])
    rows_per_user = np.zeros(num_users, dtype=np.int64)
    for depth in range(1, trie.depth + 1):
        users, nodes = key_of.unpack(keys[depth])
        forwarded = np.zeros(len(users), dtype=bool)
        if forward_leaves:
            forwarded[position[leaf_depth == depth]] = True
        below = np.empty(0, dtype=np.int64)
        if depth < trie.depth:
            below_users, below_nodes = key_of.unpack(keys[depth + 1])
            above = key_of.pack(below_users, trie.parent[below_nodes].astype(np.int64))
            below = np.searchsorted(keys[depth], above).astype(np.int64)
            forwarded[below] = True
        index = np.where(forwarded, np.cumsum(forwarded) - 1, -1)
        rows_per_user += np.bincount(users[forwarded], minlength=num_users)
        levels.append(TreeLevel(users, nodes, parent, index.astype(np.int64)))
        parent = below
    return TokenTree(tuple(levels), leaf_depth - 1, position, rows_per_user)


def repeat_trees(tree: TokenTree, candidates: Ragged, of_user: Ints) -> TokenTree:
    """The trees of users who share candidate sets: user u's is the one of set `of_user[u]`.

    Args:
        tree: of the sets `candidates` `[G]`, as `build_token_tree` gave it.
        of_user: `[U]` the set of each user.

    Array copies only: nothing is sorted or looked up again.
    """
    num_sets = candidates.num_rows
    levels: list[TreeLevel] = []
    shifts: list[Ints] = []  # per level: how far a user's nodes are from its set's
    taken = Ragged(candidates.offsets, np.arange(len(candidates.values))).take(of_user)
    for depth, level in enumerate(tree.levels):
        sizes = np.bincount(level.user, minlength=num_sets)
        nodes = Ragged.from_lengths(sizes, np.arange(len(level.user)))
        mine = nodes.take(of_user)
        users, at = mine.row_ids, mine.values
        parent = level.parent[at] + shifts[-1][users] if depth else users
        forwarded = level.forwarded[at]
        index = np.where(forwarded, np.cumsum(forwarded) - 1, -1)
        levels.append(TreeLevel(users, level.node[at], parent, index.astype(np.int64)))
        shifts.append(mine.offsets[:-1] - nodes.offsets[:-1][of_user])
    leaf_level = tree.leaf_level[taken.values]
    shift = np.asarray(shifts)[leaf_level, taken.row_ids]
    return TokenTree(
        tuple(levels),
        leaf_level,
        tree.leaf_position[taken.values] + shift,
        tree.rows_per_user[of_user],
    )


def candidate_parts(
    trie: SidTrie, candidates: Ragged, max_rows: int, more: int = 0
) -> Iterator[Ints]:
    """Cut large candidate sets into parts whose trees have at most `max_rows` nodes.

    Yields positions in `candidates.values`, by user and then by semantic ID, so that a part keeps
    the prefixes its candidates share. One user may be cut; all its parts hang from the same
    prefill. `more` is what a candidate forwards besides the nodes above its last token.
    """
    sids = trie.sid_of_item[candidates.values]
    order = np.lexsort((sids, candidates.row_ids)).astype(np.int64)
    depth = trie.depth_of_node[trie.node_of_sid[sids[order]]].astype(np.int64)
    ends = np.cumsum(depth - 1 + more)
    begin = 0
    while begin < len(order):
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + max_rows, side="right"))
        end = max(end, begin + 1)
        yield order[begin:end]
        begin = end


def _distinct(keys: Ints) -> Ints:
    """Sorted distinct values; sorts in place, which NumPy does several times faster than
    `np.unique` hashes."""
    keys.sort()
    new = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    return keys[new]


@dataclass(frozen=True, slots=True)
class _Keys:
    """(user, node) as one sortable integer."""

    num_nodes: int

    def pack(self, user: Ints, node: Ints) -> Ints:
        return user * self.num_nodes + node

    def unpack(self, key: Ints) -> tuple[Ints, Ints]:
        return key // self.num_nodes, key % self.num_nodes

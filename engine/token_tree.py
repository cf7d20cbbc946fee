"""Candidate sets as token trees: a prefix shared by candidates is one node, forwarded once.

For every user of a batch, the candidates' SIDs are merged into the sub-trie of the catalog they
span. Nodes that have a child in that sub-trie are forwarded; the last token of a candidate never
is, only its log-probability is read, at its parent. Pure NumPy on the host, one pass per level for
the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.sid_trie import SidTrie
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


def build_token_tree(trie: SidTrie, candidates: Ragged) -> TokenTree:
    """The token trees of the users' candidate sets (catalog items)."""
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
        keys[depth] = np.unique(np.concatenate([key_of.pack(user[here], leaf[here]), above]))
        users, nodes = key_of.unpack(keys[depth])
        above = key_of.pack(users, trie.parent[nodes].astype(np.int64))

    levels: list[TreeLevel] = []
    rows_per_user = np.zeros(num_users, dtype=np.int64)
    for depth in range(1, trie.depth + 1):
        users, nodes = key_of.unpack(keys[depth])
        if depth == 1:
            parent = users
        else:
            parent = np.searchsorted(
                keys[depth - 1], key_of.pack(users, trie.parent[nodes].astype(np.int64))
            ).astype(np.int64)
        forwarded = trie.num_children[nodes] > 0
        index = np.where(forwarded, np.cumsum(forwarded) - 1, -1)
        rows_per_user += np.bincount(users[forwarded], minlength=num_users)
        levels.append(TreeLevel(users, nodes, parent, index.astype(np.int64)))

    position = np.empty(len(user), dtype=np.int64)
    for depth in range(1, trie.depth + 1):
        here = leaf_depth == depth
        position[here] = np.searchsorted(keys[depth], key_of.pack(user[here], leaf[here]))
    return TokenTree(tuple(levels), leaf_depth - 1, position, rows_per_user)


def candidate_parts(trie: SidTrie, candidates: Ragged, max_rows: int) -> Iterator[Ints]:
    """Cut large candidate sets into parts whose trees have at most `max_rows` nodes.

    Yields positions in `candidates.values`, by user and then by semantic ID, so that a part keeps
    the prefixes its candidates share. One user may be cut; all its parts hang from the same
    prefill.
    """
    order = np.lexsort((trie.sid_of_item[candidates.values], candidates.row_ids)).astype(np.int64)
    size = max(1, max_rows // max(1, trie.depth - 1))
    for begin in range(0, len(order), size):
        yield order[begin : begin + size]


def tree_rows(trie: SidTrie, candidates: Ragged) -> Ints:
    """Rows that each user's candidate set forwards `[U]`, without keeping the tree; for packing."""
    return build_token_tree(trie, candidates).rows_per_user


@dataclass(frozen=True, slots=True)
class _Keys:
    """(user, node) as one sortable integer."""

    num_nodes: int

    def pack(self, user: Ints, node: Ints) -> Ints:
        return user * self.num_nodes + node

    def unpack(self, key: Ints) -> tuple[Ints, Ints]:
        return key // self.num_nodes, key % self.num_nodes

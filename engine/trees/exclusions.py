"""Exclusions and eligibility, propagated up the trie: a prefix with no item left below it is dead.

A beam never expands a dead prefix, so k results survive without generating more than k. What a
segment of users may not get is propagated once per segment, over the whole trie; what one user may
not get on top of that costs O(excluded items x levels). Both in NumPy, for the whole batch at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.trees.sid_trie import SidTrie
from schemas.requests import Eligibility, Ints, Ragged


@dataclass(frozen=True)
class EligibleTrie:
    """The trie as each of G segments sees it."""

    trie: SidTrie
    eligible: NDArray[np.bool_]  # [G, N]

    @cached_property
    def members(self) -> NDArray[np.int32]:
        """Eligible items of each sid `[G, S]`."""
        sids = self.trie.sid_of_item
        counts = [np.bincount(sids[mask], minlength=self.trie.num_sids) for mask in self.eligible]
        return np.asarray(counts, dtype=np.int32).reshape(-1, self.trie.num_sids)

    @cached_property
    def children(self) -> NDArray[np.int32]:
        """Children of each node that have an eligible item below them `[G, V]`."""
        trie = self.trie
        out = np.zeros((len(self.eligible), trie.num_nodes), dtype=np.int32)
        for counts, members in zip(out, self.members, strict=True):
            alive = np.zeros(trie.num_nodes, dtype=bool)
            alive[trie.node_of_sid[members > 0]] = True
            for depth in range(trie.depth, 0, -1):
                level = trie.level(depth)
                parents = trie.parent[level][alive[level]]
                counts += np.bincount(parents, minlength=trie.num_nodes).astype(np.int32)
                alive[parents] = True
        return out

    @cached_property
    def alive(self) -> NDArray[np.bool_]:
        """Nodes with an eligible item below them, or of their own `[G, V]`."""
        out = self.children > 0
        leaf = self.trie.node_of_sid
        out[:, leaf] = self.members > 0
        return out


def dead_nodes(
    trie: SidTrie,
    excluded: Ragged,
    eligibility: Eligibility | None = None,
    segments: EligibleTrie | None = None,
) -> Ints:
    """Sorted keys `user * V + node` of the nodes that a user's exclusions leave without any item.

    Nodes that are dead for the user's whole segment are not listed: `EligibleTrie.alive` says
    those.
    """
    size = trie.num_nodes
    pairs = np.unique(excluded.row_ids * trie.num_items + excluded.values)  # an item counts once
    user, item = pairs // trie.num_items, pairs % trie.num_items
    if eligibility is not None:
        user, item = (x[eligibility.of(user, item)] for x in (user, item))
    sid = trie.sid_of_item[item].astype(np.int64)
    leaf, gone = np.unique(user * size + trie.node_of_sid[sid], return_counts=True)
    user, sid = leaf // size, trie.sid_of_node[leaf % size].astype(np.int64)
    if eligibility is None or segments is None:
        members = np.diff(trie.first_item)[sid]
    else:
        members = segments.members[eligibility.segment[user], sid]
    found = pending = leaf[gone == members]
    for level in range(trie.depth, 0, -1):
        here = trie.depth_of_node[pending % size] == level
        user, node = pending[here] // size, pending[here] % size
        parents, gone = np.unique(user * size + trie.parent[node], return_counts=True)
        user, node = parents // size, parents % size
        if eligibility is None or segments is None:
            children = trie.num_children[node]
        else:
            children = segments.children[eligibility.segment[user], node]
        emptied = parents[gone == children]
        found = np.concatenate([found, emptied])
        pending = np.concatenate([pending[~here], emptied])
    return np.sort(found)

"""Per-user exclusions, propagated up the trie: a prefix with no eligible item below it is dead.

A beam never expands a dead prefix, so k results survive without generating more than k. The work is
O(excluded items x levels), in NumPy, for the whole batch at once.
"""

from __future__ import annotations

import numpy as np

from engine.sid_trie import SidTrie
from schemas.requests import Ints, Ragged


def dead_nodes(trie: SidTrie, excluded: Ragged) -> Ints:
    """Sorted keys `user * V + node` of the nodes under which this user has no eligible item."""
    size = trie.num_nodes
    pairs = np.unique(excluded.row_ids * trie.num_items + excluded.values)  # an item counts once
    user, item = pairs // trie.num_items, pairs % trie.num_items
    sid = trie.sid_of_item[item].astype(np.int64)
    leaf, gone = np.unique(user * size + trie.node_of_sid[sid], return_counts=True)
    sid_of_leaf = trie.sid_of_node[leaf % size]
    members = np.diff(trie.first_item)[sid_of_leaf]
    dead = leaf[gone == members]
    found = [dead]
    depth = trie.depth_of_node[dead % size]
    pending = dead
    for level in range(trie.depth, 0, -1):
        here = pending[depth == level]
        user, node = here // size, here % size
        parents, gone = np.unique(user * size + trie.parent[node], return_counts=True)
        emptied = parents[gone == trie.num_children[parents % size]]
        found.append(emptied)
        pending = np.concatenate([pending[depth != level], emptied])
        depth = trie.depth_of_node[pending % size]
    return np.sort(np.concatenate(found))

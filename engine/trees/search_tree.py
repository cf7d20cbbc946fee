"""Trees that a search expands: the catalog's trie, or the candidates of a batch as one forest.

Both are the same arrays: the children of node v are `first_child[v] : first_child[v] +
num_children[v]`, and a node that ends a semantic ID knows its number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.trees.device_trie import DeviceTrie
from engine.trees.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class SearchTree:
    """A tree of V nodes, or U of them side by side; int64 tensors on one device."""

    index: DeviceTrie  # the catalog's trie
    first_child: Tensor  # [V]
    num_children: Tensor  # [V]
    node: Tensor | None  # [V] node of the catalog's trie; None: the tree is that trie
    sid: Tensor  # [V] -1 where none ends
    depth: Tensor  # [V]
    root: Tensor | None  # [U] of each prompt; None: node 0
    levels: int  # nodes on the longest path below a root
    group: Tensor | None = None  # [V] of the quota: its node at the quota's level, or itself above

    def trie_node(self, node: Tensor) -> Tensor:
        """Nodes of the catalog's trie that nodes of this tree stand for."""
        return node if self.node is None else self.node[node]

    def roots(self, prompts: Tensor) -> Tensor:
        """Where the search of each prompt begins."""
        return torch.zeros_like(prompts) if self.root is None else self.root[prompts]


def catalog_tree(index: DeviceTrie) -> SearchTree:
    """The catalog's trie, the same for every prompt."""
    return SearchTree(
        index=index,
        first_child=index.first_child,
        num_children=index.num_children,
        node=None,
        sid=index.sid,
        depth=index.depth,
        root=None,
        levels=index.trie.depth,
        group=None if index.quota is None else index.quota.group_of_node,
    )


def candidate_forest(index: DeviceTrie, tree: TokenTree) -> SearchTree:
    """The users' candidate trees `[U]` as one forest, whose first U nodes are their roots.

    A level of a token tree is in the order of its users and of the catalog's nodes, so that
    children stand together already.
    """
    num_users = len(tree.rows_per_user)
    sizes = [num_users, *(len(level.node) for level in tree.levels)]
    begin = np.concatenate([[0], np.cumsum(sizes)])
    counts = [
        np.bincount(level.parent, minlength=size)
        for level, size in zip(tree.levels, sizes, strict=False)
    ]
    num_children = np.concatenate([*counts, np.zeros(sizes[-1], dtype=np.int64)])
    first_child = num_users + np.cumsum(num_children) - num_children
    nodes = np.concatenate([np.zeros(num_users, dtype=np.int64), *(v.node for v in tree.levels)])
    ends = np.zeros(begin[-1], dtype=bool)
    ends[begin[1:][tree.leaf_level] + tree.leaf_position] = True
    node = index.put(nodes)
    return SearchTree(
        index=index,
        first_child=index.put(first_child),
        num_children=index.put(num_children),
        node=node,
        sid=torch.where(index.put(ends), index.sid[node], -1),
        depth=index.put(np.repeat(np.arange(len(sizes)), sizes)),
        root=torch.arange(num_users, device=index.device),
        levels=len(tree.levels),
    )

"""Log-probabilities of all children of some prefixes of a search tree.

Legend: n prefixes, C children.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backend import ROUNDING, Targets
from engine.decoding import Decoding
from engine.trees.search_tree import SearchTree


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prefixes that are expanded together, in the order of their users."""

    user: Tensor  # [n] place in the search
    prompt: Tensor  # [n] row of the context that its prompt ends in
    node: Tensor  # [n] of the tree
    row: Tensor  # [n] row of the context that it ends in
    score: Tensor  # [n] float32

    def of(self, which: Tensor) -> Prefixes:
        """Some of them."""
        parts = (self.user, self.prompt, self.node, self.row, self.score)
        return Prefixes(*(part[which] for part in parts))


@dataclass(frozen=True, slots=True)
class Children:
    """What may follow, in the order of the prefixes and of the tree."""

    prefix: Tensor  # [C] which prefix it continues
    node: Tensor  # [C] of the tree
    log_prob: Tensor  # [C] float32, of its token

    @property
    def failed(self) -> Tensor:
        """Where what the model gave is no log-probability `[C]`: NaN, or above 0."""
        return self.log_prob.isnan() | (self.log_prob > ROUNDING)


def read_children(
    decoding: Decoding, tree: SearchTree, prefixes: Prefixes, num_children: int
) -> Children:
    """All children of the prefixes, `num_children` altogether."""
    count = tree.num_children[prefixes.node]
    each = torch.arange(len(count), device=count.device)
    prefix = torch.repeat_interleave(each, count, output_size=num_children)
    first = tree.first_child[prefixes.node] - (count.cumsum(0) - count)
    node = torch.arange(num_children, device=count.device) + first[prefix]
    return Children(prefix, node, _log_probs(decoding, tree, prefixes, prefix, node))


def _log_probs(
    decoding: Decoding, tree: SearchTree, prefixes: Prefixes, prefix: Tensor, node: Tensor
) -> Tensor:
    """In one call where all levels have one set of tokens and one softmax, else level by level."""
    index = tree.index
    norm, columns = index.norms[0], index.columns[0]
    if norm.kind in ("full_vocab", "sid_range") and all(one is columns for one in index.columns):
        column = index.code[tree.trie_node(node)]
        targets = Targets(row=prefix, column=column, columns=columns)
        return decoding.log_probs(prefixes.row, targets, norm)
    out = torch.empty(len(node), device=index.device)
    depth = tree.depth[prefixes.node]
    for level in range(tree.levels):
        here = (depth == level).nonzero()[:, 0]
        if not len(here):
            continue
        number = torch.full_like(depth, -1)
        number[here] = torch.arange(len(here), device=index.device)
        mine = (number[prefix] >= 0).nonzero()[:, 0]
        out[mine] = _at_level(
            decoding, tree, prefixes.of(here), number[prefix[mine]], node[mine], level
        )
    return out


def _at_level(
    decoding: Decoding,
    tree: SearchTree,
    prefixes: Prefixes,
    prefix: Tensor,
    node: Tensor,
    level: int,
) -> Tensor:
    """Of prefixes of `level` tokens."""
    index = tree.index
    norm, columns = index.norms[level], index.columns[level]
    in_trie = tree.trie_node(node)
    if norm.kind != "trie" or tree.node is None:
        targets = Targets(row=prefix, column=index.code[in_trie], columns=columns)
        return decoding.log_probs(prefixes.row, targets, norm)
    # The softmax is over all that the catalog has behind a prefix, candidates or not.
    parent = tree.trie_node(prefixes.node)
    count = index.num_children[parent]
    each = torch.arange(len(count), device=count.device)
    row = torch.repeat_interleave(each, count)
    first = index.first_child[parent] - (count.cumsum(0) - count)
    every = torch.arange(len(row), device=count.device) + first[row]
    targets = Targets(row=row, column=index.code[every], columns=columns)
    return decoding.log_probs(prefixes.row, targets, norm)[in_trie - first[prefix]]

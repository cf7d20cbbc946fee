"""The catalog's trie on the device, with the token columns and the softmax set of every level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backend import Norm, TokenColumns
from engine.trees.sid_trie import SidTrie
from schemas.requests import Ints
from schemas.semantic_ids import ItemTokens
from schemas.settings import QuotaSettings, ScoreNorm

_TOGETHER = 4096  # tokens of all levels that are read as one set


@dataclass(frozen=True, slots=True)
class Quota:
    """At most `max_items` results share their first `level` codes."""

    level: int
    max_items: int
    group_of_sid: Tensor  # [S] node of the sid's first `level` codes
    group_of_node: Tensor  # [V] the same of a node; itself further up


@dataclass(frozen=True, slots=True)
class DeviceTrie:
    """What beam search gathers from. All tensors on one device, int64."""

    trie: SidTrie
    first_child: Tensor  # [V + 1]
    num_children: Tensor  # [V]
    code: Tensor  # [V] column of the node's token in `columns` of its level
    token: Tensor  # [V] token id of the node; 0 for the root
    sid: Tensor  # [V] -1 for inner nodes
    depth: Tensor  # [V]
    columns: tuple[TokenColumns, ...]  # per level; one set for all where one softmax is over all
    norms: tuple[Norm, ...]  # per level
    token_ids: tuple[Ints, ...]  # per level, of its codes
    device: torch.device
    quota: Quota | None = None

    def put(self, array: NDArray[Any]) -> Tensor:
        """A host array on the device of the trie."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def is_dead(self, user: Tensor, node: Tensor, dead: Tensor) -> Tensor:
        """Whether (user, node) is among the sorted keys `dead` of engine/trees/exclusions.py."""
        key = user * self.trie.num_nodes + node
        at = torch.searchsorted(dead, key).clamp(max=len(dead) - 1)
        return dead[at] == key


def to_device(
    trie: SidTrie,
    tokens: ItemTokens,
    norm: ScoreNorm,
    device: torch.device,
    quota: QuotaSettings | None = None,
) -> DeviceTrie:
    """Copy the trie to the device and name the columns and the softmax set of each level."""
    depth = np.maximum(trie.depth_of_node.astype(np.int64) - 1, 0)
    code = np.maximum(trie.code.astype(np.int64), 0)
    token = tokens.tokens(depth, code)
    token[0] = 0
    levels = tuple(tokens.token_ids[: trie.depth])
    one_set = {
        id(ids): TokenColumns(ids) for ids in levels
    }  # levels may have their tokens in common
    columns = tuple(one_set[id(ids)] for ids in levels)
    norms = tuple(Norm(norm, level if norm == "level" else None) for level in columns)
    if norm == "sid_range":
        space = TokenColumns(np.unique(np.concatenate(tokens.token_ids)))
        norms = tuple(Norm(norm, space) for _ in columns)
    if norm in ("full_vocab", "sid_range"):
        columns, shift = _side_by_side(columns)
        code += shift[depth]

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)

    groups = None
    if quota is not None:
        of_node = put(trie.above(np.arange(trie.num_nodes), quota.level))
        of_sid = put(trie.prefix_of_sid(quota.level))
        groups = Quota(quota.level, quota.max_items, of_sid, of_node)
    return DeviceTrie(
        trie=trie,
        first_child=put(trie.first_child),
        num_children=put(trie.num_children),
        code=put(code),
        token=put(token),
        sid=put(trie.sid_of_node),
        depth=put(trie.depth_of_node),
        columns=columns,
        norms=norms,
        token_ids=levels,
        device=device,
        quota=groups,
    )


def _side_by_side(columns: tuple[TokenColumns, ...]) -> tuple[tuple[TokenColumns, ...], Ints]:
    """The columns of all levels as one set, and where those of each level begin in it `[L]`.

    Rows of any depth are then read in one call, and a product's last bits, which may hang on how
    many columns there are, are the same in every algorithm. Large codebooks stay apart: most of
    their columns would be multiplied in vain.
    """
    distinct = list(dict.fromkeys(columns))
    begin = np.cumsum([0, *(len(one.token_ids) for one in distinct)])
    if len(distinct) == 1 or begin[-1] > _TOGETHER:
        return columns, np.zeros(len(columns), dtype=np.int64)
    shift = np.asarray([begin[distinct.index(one)] for one in columns], dtype=np.int64)
    every = TokenColumns(np.concatenate([one.token_ids for one in distinct]))
    return (every,) * len(columns), shift

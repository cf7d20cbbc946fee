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
from schemas.semantic_ids import ItemTokens
from schemas.settings import QuotaSettings, ScoreNorm


@dataclass(frozen=True, slots=True)
class Quota:
    """At most `max_items` results share their first `level` codes."""

    level: int
    max_items: int
    group_of_sid: Tensor  # [S] node of the sid's first `level` codes


@dataclass(frozen=True, slots=True)
class DeviceTrie:
    """What beam search gathers from. All tensors on one device, int64."""

    trie: SidTrie
    first_child: Tensor  # [V + 1]
    num_children: Tensor  # [V]
    code: Tensor  # [V] column of the node's token inside its level's codebook
    token: Tensor  # [V] token id of the node; 0 for the root
    sid: Tensor  # [V] -1 for inner nodes
    columns: tuple[TokenColumns, ...]  # per level
    norms: tuple[Norm, ...]  # per level
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
    levels = tokens.token_ids[: trie.depth]
    one_set = {
        id(ids): TokenColumns(ids) for ids in levels
    }  # levels may have their tokens in common
    columns = tuple(one_set[id(ids)] for ids in levels)
    norms = tuple(Norm(norm, level if norm == "level" else None) for level in columns)
    if norm == "sid_range":
        every = TokenColumns(np.unique(np.concatenate(tokens.token_ids)))
        norms = tuple(Norm(norm, every) for _ in columns)

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)

    return DeviceTrie(
        trie=trie,
        first_child=put(trie.first_child),
        num_children=put(trie.num_children),
        code=put(code),
        token=put(token),
        sid=put(trie.sid_of_node),
        columns=columns,
        norms=norms,
        device=device,
        quota=None
        if quota is None
        else Quota(quota.level, quota.max_items, put(trie.prefix_of_sid(quota.level))),
    )

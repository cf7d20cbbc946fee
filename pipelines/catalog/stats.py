"""What a catalog's trie is like: its levels, its sharing, and what scoring over it will forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.trees.sid_trie import SidTrie
from engine.trees.token_tree import build_token_tree
from pipelines.catalog.items import list_items, read_items
from schemas.requests import Ragged
from schemas.semantic_ids import SidSpace
from schemas.settings import RunConfig

_SAMPLED_USERS = 32
_CANDIDATES = (100, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelStats:
    """The prefixes of one length. Children count over those that have any."""

    level: int
    available: int  # codes of the level
    nodes: int  # prefixes of this length
    children_min: int | None  # None at the last level
    children_mean: float | None
    children_max: int | None
    forced_share: float | None  # of the prefixes with children, those with a single one


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingStats:
    """Rows one user's candidate set forwards, on average over sets drawn at random."""

    candidates: int
    rows_forwarded: float  # as a token tree
    rows_per_token: float  # one row per token of every candidate
    rows_without_last: float  # the same, the last token of each not forwarded


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogStats:
    """What a catalog's trie is like."""

    items: int
    sids: int
    shared_sids: int
    largest_group: int
    first_level_children: int
    forced_last_share: float  # of the SIDs, those whose last token is the only one possible
    trie_bytes: int
    levels: tuple[LevelStats, ...]
    packing: tuple[PackingStats, ...]


def catalog_stats(config: RunConfig) -> CatalogStats:
    """Read a configuration's catalog and measure its trie.

    Raises:
        InputError: the catalog cannot be used; `check_catalog` tells everything that is wrong.
    """
    space = config.space
    trie = read_items(config, list_items(config).files).trie
    group = np.diff(trie.first_item)
    last = trie.num_children[trie.parent[trie.node_of_sid]]
    return CatalogStats(
        items=trie.num_items,
        sids=trie.num_sids,
        shared_sids=int((group > 1).sum()),
        largest_group=int(group.max()),
        first_level_children=int(trie.num_children[0]),
        forced_last_share=float((last == 1).mean()),
        trie_bytes=trie.num_bytes,
        levels=tuple(_level_stats(trie, d, space) for d in range(1, trie.depth + 1)),
        packing=tuple(_packing_stats(trie, num) for num in _CANDIDATES),
    )


def _level_stats(trie: SidTrie, depth: int, space: SidSpace) -> LevelStats:
    children = trie.num_children[trie.level(depth)]
    inner = children[children > 0]
    return LevelStats(
        level=depth,
        available=(*space.sizes, 0)[depth - 1] + (space.end_token is not None and depth > 1),
        nodes=len(children),
        children_min=int(inner.min()) if len(inner) else None,
        children_mean=float(inner.mean()) if len(inner) else None,
        children_max=int(inner.max()) if len(inner) else None,
        forced_share=float((inner == 1).mean()) if len(inner) else None,
    )


def _packing_stats(trie: SidTrie, candidates: int) -> PackingStats:
    num = min(candidates, trie.num_items)
    rng = np.random.default_rng(0)
    sets = [rng.choice(trie.num_items, num, replace=False) for _ in range(_SAMPLED_USERS)]
    drawn = Ragged.from_lengths(np.full(_SAMPLED_USERS, num), np.concatenate(sets))
    tree = build_token_tree(trie, drawn)
    tokens = float((tree.leaf_level + 1).sum()) / _SAMPLED_USERS
    return PackingStats(
        candidates=num,
        rows_forwarded=tree.num_rows / _SAMPLED_USERS,
        rows_per_token=tokens,
        rows_without_last=tokens - num,
    )

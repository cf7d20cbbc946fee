"""Rank: from scores and beams to each user's top k, and what became of the users who have none.

Order: score descending, then SID codes, then item id. An item stands once per user. Where an item
was both scored as a candidate and generated, its source is `score`. Array operations only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.catalog.build import Catalog
from schemas.requests import UNSCORED, BatchResult, Eligibility, Ints, Ragged, place_within
from schemas.settings import CollisionPolicy, QuotaSettings

SOURCES = np.asarray(["score", "generate", "label"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """Recommendations of a batch, by user and rank; and, per user, whether the list is proven
    exact.
    """

    user: Ints  # [M]
    rank: NDArray[np.int32]  # [M] 1-based
    item: Ints  # [M]
    score: NDArray[np.float32]  # [M]
    source: NDArray[np.int64]  # [M] index into SOURCES
    labels: NDArray[np.float32] | None  # [M, most labels]; see ItemScores
    exact: NDArray[np.bool_]  # [U]
    unscored: NDArray[np.bool_]  # [U] a list that is short for want of scores by the model
    returned: NDArray[np.int32]  # [U]


def rank_batch(
    result: BatchResult,
    catalog: Catalog,
    excluded: Ragged,
    *,
    k: Ints,
    collisions: CollisionPolicy,
    eligibility: Eligibility | None = None,
    quota: QuotaSettings | None = None,
) -> Ranked:
    """Each user's top `k` `[U]`.

    A list of scored candidates is always exact: every candidate was scored. A list with generated
    items is exact when its k-th score beats every prefix the beam search dropped, or when it
    dropped none.
    """
    rows = _collect(result, catalog, excluded, eligibility)
    rows = rows.take(~result.failed[rows.user])
    rows = _one_source(rows, len(catalog.table))
    sid_of_item = catalog.trie.sid_of_item
    if collisions != "all":
        sid = sid_of_item[rows.item].astype(np.int64)
        rows = rows.take(_preferred(rows.user, sid, rows.item, catalog, collisions))
    # Item positions are in the order of item ids; sids are in the order of their codes.
    best_first = -rows.score.astype(np.float64)
    rows = rows.take(np.lexsort((rows.item, sid_of_item[rows.item], best_first, rows.user)))
    if quota is not None:
        group = catalog.trie.prefix_of_sid(quota.level)[sid_of_item[rows.item]]
        place = place_within(rows.user * catalog.trie.num_nodes + group)
        rows = rows.take(place < quota.max_items)
    starts = np.searchsorted(rows.user, np.arange(result.num_users))
    rank = np.arange(len(rows.user)) - starts[rows.user] + 1
    top = rank <= k[rows.user]
    rows, rank = rows.take(top), rank[top]
    labels = None
    if result.scored is not None and result.scored.labels is not None:
        labels = result.scored.labels[rows.entry]
    returned = np.bincount(rows.user, minlength=result.num_users).astype(np.int32)
    unscored = np.zeros(result.num_users, dtype=bool)
    if result.generated is not None:
        unscored = (result.generated.pruned == UNSCORED) & (returned < k)
    return Ranked(
        user=rows.user,
        rank=rank.astype(np.int32),
        item=rows.item,
        score=rows.score,
        source=rows.source,
        labels=labels,
        exact=_certified(result, rows.user, rows.score, rank, k),
        unscored=unscored,
        returned=returned,
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Recommendations being sorted out; all `[M]`."""

    user: Ints
    item: Ints
    score: NDArray[np.float32]
    source: Ints  # index into SOURCES
    entry: Ints  # place among the scored candidates, -1 for a generated item

    def take(self, which: NDArray[Any]) -> _Rows:
        """The rows at these places, or where this mask holds."""
        return _Rows(
            self.user[which],
            self.item[which],
            self.score[which],
            self.source[which],
            self.entry[which],
        )


def _collect(
    result: BatchResult, catalog: Catalog, excluded: Ragged, eligibility: Eligibility | None
) -> _Rows:
    """Scored candidates, and the eligible items of generated SIDs, end to end."""
    parts = []
    if result.scored is not None:
        scored = result.scored
        source = np.full(len(scored.user), 0 if scored.labels is None else 2, dtype=np.int64)
        entry = np.arange(len(scored.user), dtype=np.int64)
        parts.append(_Rows(scored.user, scored.item, scored.score, source, entry))
    if result.generated is not None:
        beams, trie = result.generated, catalog.trie
        members = np.diff(trie.first_item)[beams.sid]
        user = np.repeat(beams.user, members)
        offset = np.repeat(trie.first_item[beams.sid] - (np.cumsum(members) - members), members)
        item = trie.items[offset + np.arange(len(user))].astype(np.int64)
        size = trie.num_items
        allowed = ~np.isin(user * size + item, excluded.row_ids * size + excluded.values)
        if eligibility is not None:
            allowed &= eligibility.of(user, item)
        ones = np.ones(len(user), dtype=np.int64)
        found = _Rows(user, item, np.repeat(beams.score, members), ones, -ones)
        parts.append(found.take(allowed))
    names = ("user", "item", "score", "source", "entry")
    return _Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _one_source(rows: _Rows, num_items: int) -> _Rows:
    """Each (user, item) once, the scored one before the generated one."""
    rows = rows.take(np.lexsort((rows.source, rows.user * num_items + rows.item)))
    first = np.ones(len(rows.user), dtype=bool)
    first[1:] = (rows.user[1:] != rows.user[:-1]) | (rows.item[1:] != rows.item[:-1])
    return rows.take(first)


def _preferred(
    user: Ints, sid: Ints, item: Ints, catalog: Catalog, policy: CollisionPolicy
) -> NDArray[np.bool_]:
    """Which entries survive when one item is kept per (user, SID)."""
    row = catalog.table.column("catalog_row").to_numpy()[item]
    liked = catalog.popularity[item] if policy == "most_popular" else np.zeros(len(item))
    tie = item if policy == "most_popular" else row
    order = np.lexsort((tie, -liked, sid, user))
    first = np.ones(len(order), dtype=bool)
    same = (user[order][1:] == user[order][:-1]) & (sid[order][1:] == sid[order][:-1])
    first[1:] = ~same
    keep = np.zeros(len(order), dtype=bool)
    keep[order[first]] = True
    return keep


def _certified(
    result: BatchResult, user: Ints, score: NDArray[np.float32], rank: Ints, k: Ints
) -> NDArray[np.bool_]:
    if result.generated is None:
        return np.ones(result.num_users, dtype=bool)
    kth = np.full(result.num_users, -np.inf, dtype=np.float32)
    last = rank == k[user]
    kth[user[last]] = score[last]
    pruned = result.generated.pruned
    # Strictly above: at equality a dropped prefix could still hold an item of the same score.
    certified: NDArray[np.bool_] = (kth > pruned) | (pruned == -np.inf)
    return certified

"""Rank: from scores and beams to each user's top k, and what became of the users who have none.

Order: score descending, then SID codes, then item id. An item stands once per user. Where an item
was both scored as a candidate and generated, its source is `score`. Array operations only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.catalog import Catalog
from schemas.requests import BatchResult, Eligibility, Ints, Ragged, place_within
from schemas.settings import CollisionPolicy, QuotaSettings

SOURCES = np.asarray(["score", "generate"])


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
    exact: NDArray[np.bool_]  # [U]
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
    user, item, score, source = _collect(result, catalog, excluded, eligibility)
    kept = ~result.failed[user]
    user, item, score, source = user[kept], item[kept], score[kept], source[kept]
    user, item, score, source = _one_source(user, item, score, source, len(catalog.table))
    sid = catalog.trie.sid_of_item[item].astype(np.int64)
    if collisions != "all":
        keep = _preferred(user, sid, item, catalog, collisions)
        user, item, score = user[keep], item[keep], score[keep]
        source, sid = source[keep], sid[keep]
    # Item positions are in the order of item ids; sids are in the order of their codes.
    order = np.lexsort((item, sid, -score.astype(np.float64), user))
    user, item, score, source = user[order], item[order], score[order], source[order]
    if quota is not None:
        group = catalog.trie.prefix_of_sid(quota.level)[catalog.trie.sid_of_item[item]]
        keep = place_within(user * catalog.trie.num_nodes + group) < quota.max_items
        user, item, score, source = user[keep], item[keep], score[keep], source[keep]
    starts = np.searchsorted(user, np.arange(result.num_users))
    rank = np.arange(len(user)) - starts[user] + 1
    top = rank <= k[user]
    exact = _certified(result, user[top], score[top], rank[top], k)
    return Ranked(
        user=user[top],
        rank=rank[top].astype(np.int32),
        item=item[top],
        score=score[top],
        source=source[top],
        exact=exact,
        returned=np.bincount(user[top], minlength=result.num_users).astype(np.int32),
    )


def _collect(
    result: BatchResult, catalog: Catalog, excluded: Ragged, eligibility: Eligibility | None
) -> tuple[Ints, Ints, NDArray[np.float32], Ints]:
    """Scored candidates, and the eligible items of generated SIDs, end to end."""
    users, items, scores, sources = [], [], [], []
    if result.scored is not None:
        users.append(result.scored.user)
        items.append(result.scored.item)
        scores.append(result.scored.score)
        sources.append(np.zeros(len(result.scored.user), dtype=np.int64))
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
        users.append(user[allowed])
        items.append(item[allowed])
        scores.append(np.repeat(beams.score, members)[allowed])
        sources.append(np.ones(int(allowed.sum()), dtype=np.int64))
    return (
        np.concatenate(users),
        np.concatenate(items),
        np.concatenate(scores),
        np.concatenate(sources),
    )


def _one_source(
    user: Ints, item: Ints, score: NDArray[np.float32], source: Ints, num_items: int
) -> tuple[Ints, Ints, NDArray[np.float32], Ints]:
    """Keep each (user, item) once, the scored one before the generated one."""
    order = np.lexsort((source, user * num_items + item))
    user, item, score, source = user[order], item[order], score[order], source[order]
    first = np.ones(len(user), dtype=bool)
    first[1:] = (user[1:] != user[:-1]) | (item[1:] != item[:-1])
    return user[first], item[first], score[first], source[first]


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

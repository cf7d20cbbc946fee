"""What a user would have got without a model: the most popular items, or any items.

Both are drawn from the user's *pool*: the items that the run itself could have recommended to that
user. Where the catalog is searched that is all of it, else it is the user's candidates;
in either case without what is excluded for the user and what `task.eligibility` does not allow it.

A pool is a stretch of an item array in the order of popularity, and a list of places in it that
this user must not get. The r-th allowed item stands at `r + #{i : e_i - i <= r}` for the places
`e_0 < e_1 < …` that are left out, so that neither baseline builds a mask over the catalog.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.catalog.build import Catalog
from schemas.requests import CandidateSets, Ints, Ragged, UserBatch
from schemas.settings import TaskSettings


@dataclass(frozen=True, slots=True)
class Pool:
    """The items that some users could have got."""

    users: Ints  # [M] rows of the batch
    items: Ints  # the most popular first
    start: Ints  # [M] where each user's stretch begins
    size: Ints  # [M]
    left_out: Ragged  # [M] places in the stretch that a user must not get, ascending
    own: bool  # each user has a stretch of its own; else all have the same

    @property
    def allowed(self) -> Ints:
        """Items each user could have got `[M]`."""
        return self.size - self.left_out.lengths

    def pick(self, number: Ints) -> Ints:
        """The items that are number 0, 1, … among each user's allowed ones `[M, K]`; -1: none."""
        valid = (number >= 0) & (number < self.allowed[:, None])
        place = number + _skipped(self.left_out, number)
        at = np.where(valid, self.start[:, None] + place, 0)
        if not len(self.items):
            return np.full_like(number, -1)
        out: Ints = np.where(valid, self.items[at], -1)
        return out


def _skipped(left_out: Ragged, number: Ints) -> Ints:
    """Places left out before each allowed number `[M, K]`."""
    if not len(left_out.values):
        return np.zeros_like(number)
    order = np.arange(len(left_out.values)) - np.repeat(left_out.offsets[:-1], left_out.lengths)
    before = left_out.values - order  # allowed places before each one left out; ascending
    big = int(max(before.max(), number.max())) + 2
    keys = left_out.row_ids * big + before
    rows = np.arange(left_out.num_rows)[:, None]
    found = np.searchsorted(keys, rows * big + number, side="right")
    out: Ints = np.maximum(found - left_out.offsets[:-1, None], 0)
    return out


def popular(pool: Pool, k: Ints, width: int) -> Ints:
    """The most popular items of each user's pool `[M, width]`; at most `k` `[M]` of them."""
    number = np.broadcast_to(np.arange(width), (len(pool.users), width))
    return pool.pick(np.where(number < k[:, None], number, -1))


def random(pool: Pool, k: Ints, width: int, rng: np.random.Generator) -> Ints:
    """Distinct items of each user's pool in random order `[M, width]`; at most `k` `[M]` of them.

    Source of the sampling without replacement: Floyd, in Bentley, Programming Pearls: a sample of
    brilliance, CACM 30(9), 1987.
    """
    allowed = pool.allowed
    count = np.minimum(np.minimum(k, allowed), width)
    chosen = np.full((len(pool.users), width), -1, dtype=np.int64)
    for step in range(width):
        top = allowed - count + step  # the sample grows by one from 0..top
        drawn = rng.integers(0, np.maximum(top, 0) + 1)
        taken = (chosen[:, :step] == drawn[:, None]).any(axis=1)
        chosen[:, step] = np.where(step < count, np.where(taken, top, drawn), -1)
    keys = np.where(chosen >= 0, rng.random(chosen.shape), 2.0)
    return pool.pick(np.take_along_axis(chosen, np.argsort(keys, axis=1), axis=1))


def pools(batch: UserBatch, catalog: Catalog, task: TaskSettings, order: Ints) -> Iterator[Pool]:
    """The pools of a shard's users; every user is in one.

    Args:
        order: all items `[N]`, the most popular first.
    """
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    if not task.searches_catalog:
        assert batch.candidates is not None, "a task that does not generate has candidates"
        if not batch.candidates.shared:
            yield _own(batch.candidates, place)
            return
    yield from _shared(batch, order, place, task)


def _own(candidates: CandidateSets, place: Ints) -> Pool:
    """Sets of one's own hold nothing that the user must not get."""
    lists = candidates.lists()
    items = lists.values[np.lexsort((place[lists.values], lists.row_ids))]
    users = np.arange(lists.num_rows, dtype=np.int64)
    none = Ragged.empty(lists.num_rows)
    return Pool(users, items, lists.offsets[:-1], lists.lengths, none, own=True)


def _shared(batch: UserBatch, order: Ints, place: Ints, task: TaskSettings) -> Iterator[Pool]:
    """One pool for each combination of a set of items and a segment of the eligibility."""
    none = np.zeros(batch.num_users, dtype=np.int64)
    sets = None if task.searches_catalog else batch.candidates
    of_set = none if sets is None else sets.of_user
    of_segment = none if batch.eligibility is None else batch.eligibility.segment
    if not batch.num_users:
        return
    groups, of_user = np.unique(np.stack([of_set, of_segment]), axis=1, return_inverse=True)
    for number, (which, segment) in enumerate(groups.T.tolist()):
        inside = np.ones(len(order), dtype=bool)
        if sets is not None:
            inside[:] = False
            inside[sets.sets.row(which)] = True
        if batch.eligibility is not None:
            inside &= batch.eligibility.eligible[segment]
        users = np.flatnonzero(of_user.reshape(-1) == number).astype(np.int64)
        yield _pool_of(users, inside, batch.excluded, order, place)


def _pool_of(
    users: Ints, inside: NDArray[np.bool_], excluded: Ragged | None, order: Ints, place: Ints
) -> Pool:
    items = order[inside[order]]
    left_out = Ragged.empty(len(users))
    if excluded is not None:
        mine = excluded.take(users)
        mine = mine.keep(inside[mine.values])
        # Places among the items inside, each once and ascending.
        number = np.cumsum(inside[order]) - 1
        keys = np.unique(mine.row_ids * len(order) + number[place[mine.values]])
        lengths = np.bincount(keys // len(order), minlength=len(users))
        left_out = Ragged.from_lengths(lengths, keys % len(order))
    start = np.zeros(len(users), dtype=np.int64)
    size = np.full(len(users), len(items), dtype=np.int64)
    return Pool(users, items, start, size, left_out, own=False)


def reachable(pool: Pool, user: Ints, item: Ints, num_items: int) -> NDArray[np.bool_]:
    """Whether each user, a row of the pool, could have got the item; elementwise."""
    wanted = user * num_items + item
    if pool.own:
        owner = np.repeat(np.arange(len(pool.users)), pool.size)
        there: NDArray[np.bool_] = np.isin(wanted, owner * num_items + pool.items)
        return there
    inside = np.zeros(num_items, dtype=bool)
    inside[pool.items] = True
    out = pool.left_out
    gone = np.isin(wanted, out.row_ids * num_items + pool.items[out.values])
    return np.logical_and(inside[item], ~gone)

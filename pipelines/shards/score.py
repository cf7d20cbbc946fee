"""Score a shard: prompts, packs, engine, rank; results come back in the order of the users."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.catalog.build import Catalog
from pipelines.inputs.read_batches import ShardInput
from pipelines.inputs.row_rules import QuarantinedRow
from pipelines.shards.rank import Ranked, rank_batch
from schemas.requests import BatchResult, Ints, Ragged, Rejection, join_labels
from schemas.search_work import NativeBeams, SearchWork
from schemas.settings import TaskSettings

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.packing.preparation import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardScores:
    """A scored shard: recommendations by user, and per user what happened."""

    user: Ints  # [M] ascending
    rank: NDArray[np.int32]
    item: Ints
    score: NDArray[np.float32]
    source: Ints
    labels: NDArray[np.float32] | None  # [M, most labels]; NaN behind a user's own
    exact: NDArray[np.bool_]  # [U]
    unscored: NDArray[np.bool_]  # [U] a list that is short for want of scores by the model
    returned: NDArray[np.int32]  # [U]
    legal_mass: NDArray[np.float32]  # [U] NaN: not known
    prompt_tokens: Ints  # [U]
    reused_tokens: Ints  # [U] of its prompt, not forwarded for it
    truncated_tokens: Ints  # [U]
    rows: Ints  # [U] forwarded
    rows_naive: Ints  # [U]
    rejected: NDArray[np.bool_]  # [U]
    widths: Ints  # [U] widest beam; 0: none was used
    quarantined: list[QuarantinedRow]
    engine_seconds: float
    search: SearchWork  # [U] nothing where no search was needed
    native: NativeBeams | None = None


def score_shard(
    shard: ShardInput,
    engine: Engine,
    catalog: Catalog,
    task: TaskSettings,
    progress: Callable[[int], None],
) -> ShardScores:
    """Take all users of a shard through the engine; `progress` is told how many users were done.

    A pack is ranked while the engine runs the next one.
    """
    started = time.perf_counter()
    prepared = engine.prepare(shard.users)
    lists = _Lists(shard, prepared, catalog, task)
    engine_seconds = time.perf_counter() - started
    ranking: Future[None] | None = None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank") as ranker:
        for pack in prepared.packs:
            started = time.perf_counter()
            result = engine.run(prepared, pack)
            engine_seconds += time.perf_counter() - started
            if ranking is not None:
                ranking.result()
            ranking = ranker.submit(lists.add, pack, result)
            progress(len(pack))
        if ranking is not None:
            ranking.result()
    progress(shard.users.num_users - sum(len(pack) for pack in prepared.packs))
    return lists.scores(engine_seconds)


class _Lists:
    """What the packs of a shard came to, back in the order of its users."""

    def __init__(
        self, shard: ShardInput, prepared: Prepared, catalog: Catalog, task: TaskSettings
    ) -> None:
        num = shard.users.num_users
        self._shard, self._prepared, self._catalog, self._task = shard, prepared, catalog, task
        self._parts: list[tuple[Ints, Ranked]] = []
        self._quarantined = list(quarantine(shard, prepared.rejections))
        self._rejected = np.zeros(num, dtype=bool)
        self._rejected[[r.user for r in prepared.rejections]] = True
        self._exact = np.zeros(num, dtype=bool)
        self._unscored = np.zeros(num, dtype=bool)
        self._returned = np.zeros(num, dtype=np.int32)
        self._legal_mass = np.full(num, np.nan, dtype=np.float32)
        self._rows = np.zeros(num, dtype=np.int64)
        self._rows_naive = np.zeros(num, dtype=np.int64)
        self._widths = np.zeros(num, dtype=np.int64)
        self._reused = np.zeros(num, dtype=np.int64)
        self._native: list[NativeBeams | None] = []
        self._search = SearchWork.none(num)

    def add(self, pack: Ints, result: BatchResult) -> None:
        """Rank the users of one pack."""
        users = self._shard.users
        ranked = rank_batch(
            result,
            self._catalog,
            Ragged.empty(len(pack)) if users.excluded is None else users.excluded.take(pack),
            k=self._shard.k[pack],
            collisions=self._task.collisions,
            quota=self._task.quota,
            eligibility=users.eligibility.take(pack) if users.eligibility else None,
        )
        failed = pack[result.failed]
        self._rejected[failed] = True
        rejections = [Rejection(int(u), *_NOT_A_NUMBER) for u in failed]
        self._quarantined += quarantine(self._shard, rejections)
        self._exact[pack], self._returned[pack] = ranked.exact, ranked.returned
        self._unscored[pack] = ranked.unscored
        self._rows[pack], self._rows_naive[pack] = result.rows, result.rows_naive
        self._reused[pack] = self._prepared.reused_tokens[pack]
        if result.generated is not None:
            self._legal_mass[pack] = result.generated.legal_mass
            self._widths[pack] = result.generated.width
        self._native.append(result.native)
        if result.search is not None:
            self._search.put(pack, result.search)
        self._parts.append((pack, ranked))

    def scores(self, engine_seconds: float) -> ShardScores:
        """All packs together."""
        parts = self._parts
        user = _concat([pack[ranked.user] for pack, ranked in parts], np.int64)
        order = np.argsort(user, kind="stable")  # packs are by prompt length

        def joined(name: str, dtype: type) -> NDArray[Any]:
            return _concat([getattr(ranked, name) for _, ranked in parts], dtype)[order]

        return ShardScores(
            user=user[order],
            rank=joined("rank", np.int32),
            item=joined("item", np.int64),
            score=joined("score", np.float32),
            source=joined("source", np.int64),
            labels=_label_scores([r for _, r in parts], order),
            exact=self._exact,
            unscored=self._unscored,
            returned=self._returned,
            legal_mass=self._legal_mass,
            prompt_tokens=self._prepared.prompt_tokens,
            reused_tokens=self._reused,
            truncated_tokens=self._prepared.truncated_tokens,
            rows=self._rows,
            rows_naive=self._rows_naive,
            rejected=self._rejected,
            widths=self._widths,
            quarantined=self._quarantined,
            engine_seconds=engine_seconds,
            native=NativeBeams.total(self._native),
            search=self._search,
        )


_NOT_A_NUMBER = (
    "score_not_finite",
    "the model gave NaN, -inf or a log-probability above 0 where this user needs a score",
)


def _label_scores(parts: list[Ranked], order: Ints) -> NDArray[np.float32] | None:
    """Label scores of all rows in this order, as wide as the widest part; None: no labels."""
    joined = join_labels([ranked.labels for ranked in parts])
    return None if joined is None else joined[order]


def quarantine(shard: ShardInput, rejections: list[Rejection]) -> Iterator[QuarantinedRow]:
    """Rows for the quarantine of users that the engine could not take."""
    for rejection in rejections:
        yield QuarantinedRow(
            table="users",
            key=str(shard.user_ids[rejection.user].as_py()),
            rule=rejection.rule,
            message=rejection.message,
            payload={},
        )


def _concat(parts: list[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype=dtype), *parts]).astype(dtype, copy=False)

"""Score a shard: prompts, packs, engine, rank; results come back in the order of the users."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipelines.catalog import Catalog
from pipelines.rank import Ranked, rank_batch
from pipelines.read import ShardInput
from pipelines.validate import QuarantinedRow
from schemas.requests import Ints, Ragged, Rejection, join_labels
from schemas.settings import TaskSettings

if TYPE_CHECKING:
    from engine.worker import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardScores:
    """A scored shard: recommendations by user, and per user what happened."""

    user: Ints  # [M] ascending
    rank: NDArray[np.int32]
    item: Ints
    score: NDArray[np.float32]
    source: Ints
    labels: NDArray[np.float32] | None  # [M, most labels] of task.label, NaN behind a user's own
    exact: NDArray[np.bool_]  # [U]
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


def score_shard(
    shard: ShardInput,
    engine: Engine,
    catalog: Catalog,
    task: TaskSettings,
    progress: Callable[[int], None],
) -> ShardScores:
    """Take all users of a shard through the engine; `progress` is told how many users were done."""
    num = shard.users.num_users
    started = time.perf_counter()
    prepared = engine.prepare(shard.users)
    rejected = np.zeros(num, dtype=bool)
    quarantined = list(quarantine(shard, prepared.rejections))
    rejected[[r.user for r in prepared.rejections]] = True
    exact = np.zeros(num, dtype=bool)
    returned = np.zeros(num, dtype=np.int32)
    legal_mass = np.full(num, np.nan, dtype=np.float32)
    rows = np.zeros(num, dtype=np.int64)
    rows_naive = np.zeros(num, dtype=np.int64)
    widths = np.zeros(num, dtype=np.int64)
    reused = np.zeros(num, dtype=np.int64)
    parts: list[tuple[Ints, Ranked]] = []
    engine_seconds = time.perf_counter() - started
    for pack in prepared.packs:
        started = time.perf_counter()
        result = engine.run(prepared, pack)
        engine_seconds += time.perf_counter() - started
        excluded = shard.users.excluded
        ranked = rank_batch(
            result,
            catalog,
            Ragged.empty(len(pack)) if excluded is None else excluded.take(pack),
            k=shard.k[pack],
            collisions=task.collisions,
            quota=task.quota,
            eligibility=shard.users.eligibility.take(pack) if shard.users.eligibility else None,
        )
        failed = pack[result.failed]
        rejected[failed] = True
        quarantined += quarantine(shard, (Rejection(int(u), *_NOT_A_NUMBER) for u in failed))
        exact[pack], returned[pack] = ranked.exact, ranked.returned
        rows[pack], rows_naive[pack] = result.rows, result.rows_naive
        reused[pack] = prepared.reused_tokens[pack]
        if result.generated is not None:
            legal_mass[pack] = result.generated.legal_mass
            widths[pack] = result.generated.width
        parts.append((pack, ranked))
        progress(len(pack))
    progress(num - sum(len(pack) for pack in prepared.packs))

    user = _concat([pack[ranked.user] for pack, ranked in parts], np.int64)
    order = np.argsort(
        user, kind="stable"
    )  # packs are by prompt length; back to the order of users
    return ShardScores(
        user=user[order],
        rank=_concat([ranked.rank for _, ranked in parts], np.int32)[order],
        item=_concat([ranked.item for _, ranked in parts], np.int64)[order],
        score=_concat([ranked.score for _, ranked in parts], np.float32)[order],
        source=_concat([ranked.source for _, ranked in parts], np.int64)[order],
        labels=_label_scores([ranked for _, ranked in parts], order) if task.label else None,
        exact=exact,
        returned=returned,
        legal_mass=legal_mass,
        prompt_tokens=prepared.prompt_tokens,
        reused_tokens=reused,
        truncated_tokens=prepared.truncated_tokens,
        rows=rows,
        rows_naive=rows_naive,
        rejected=rejected,
        widths=widths,
        quarantined=quarantined,
        engine_seconds=engine_seconds,
    )


_NOT_A_NUMBER = ("score_not_finite", "the model gave NaN or -inf for this user")


def _label_scores(parts: list[Ranked], order: Ints) -> NDArray[np.float32]:
    """Label scores of all rows in this order, as wide as the widest part."""
    joined = join_labels([ranked.labels for ranked in parts])
    return np.empty((0, 0), dtype=np.float32) if joined is None else joined[order]


def quarantine(
    shard: ShardInput, rejections: Iterator[Rejection] | list[Rejection]
) -> Iterator[QuarantinedRow]:
    """Rows for the quarantine of users that the engine could not take."""
    for rejection in rejections:
        yield QuarantinedRow(
            table="users",
            key=str(shard.user_ids[rejection.user].as_py()),
            rule=rejection.rule,
            message=rejection.message,
            payload={},
        )


def _concat(parts: list[NDArray[np.generic]], dtype: type) -> NDArray:  # type: ignore[type-arg]
    return np.concatenate([np.empty(0, dtype=dtype), *parts]).astype(dtype, copy=False)

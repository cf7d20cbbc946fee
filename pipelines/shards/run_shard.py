"""One shard, start to receipt: read, validate, score, rank, account, stage, and the receipt last.

A shard with a receipt is done and is never run again. Launchers call this and nothing else.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from pipelines.catalog.build import Catalog
from pipelines.inputs.read_batches import ShardInput, read_shard
from pipelines.inputs.row_rules import QuarantinedRow
from pipelines.shards.embed import embed_shard
from pipelines.shards.score import ShardScores, score_shard
from pipelines.shards.write import (
    embedding_outcomes,
    embedding_rows,
    outcome_rows,
    quarantine_rows,
    recommendation_rows,
    stage,
)
from pipelines.storage import files
from pipelines.storage.files import Written
from pipelines.storage.records import read_record
from pipelines.storage.seals import is_written
from schemas.counts import Counts
from schemas.errors import (
    AccountingError,
    NightshelfError,
    RecordError,
    ShardFailedError,
    StorageError,
    is_panic,
)
from schemas.runs import RunPlan, Shard, ShardReceipt, StagedKind

if TYPE_CHECKING:
    from engine.engine import Engine


def receipt_path(plan: RunPlan, shard: Shard) -> str:
    """Where a shard's receipt is."""
    return files.join(plan.run_dir, "receipts", f"{shard.name}.json")


def load_receipt(plan: RunPlan, shard: Shard, *, prove: bool = True) -> ShardReceipt | None:
    """The shard's receipt, or None when it is not done.

    A receipt of which a staged file is gone, or is not what was written, does not count: the shard
    is run again. With `prove` off only sizes are looked at, for those who show what is done.
    """
    path = receipt_path(plan, shard)
    if not files.exists(path):
        return None
    try:
        receipt = read_record(ShardReceipt, path)
    except RecordError:
        raise  # it proves something, which another release can read
    except (ValueError, StorageError):
        return None  # a damaged receipt proves nothing
    if (receipt.run_id, receipt.shard) != (plan.run_id, shard.index):
        return None
    for file in receipt.files.values():
        staged = files.join(plan.run_dir, file.path)
        if prove and not is_written(staged, Written(file.bytes, file.xxh3)):
            return None
        if not prove and not files.exists(staged):
            return None
    return receipt


def run_shard(
    plan: RunPlan,
    shard: Shard,
    engine: Engine,
    catalog: Catalog | None,
    progress: Callable[[int], None] = lambda users: None,
    read: Callable[[Shard], ShardInput] | None = None,
) -> ShardReceipt:
    """Score one shard and leave its receipt.

    Args:
        progress: told how many users more are done.
        read: gives the shard's rows, where the caller reads ahead.

    Raises:
        AccountingError: rows do not balance; nothing is kept.
        StorageError: a file could not be read or written.
        ShardFailedError: anything else that went wrong inside.
    """
    started = time.perf_counter()
    attempt = uuid.uuid4().hex[:8]
    with _shard_context(plan, shard):
        data = read(shard) if read else read_shard(plan, shard, catalog)
        if not plan.config.task.gives_lists:
            result = _embed(plan, data, engine, progress)
        else:
            assert catalog is not None, "recommendations need a catalog"
            result = _recommend(plan, data, engine, catalog, progress)
        _balance(result, shard)
        tables: dict[StagedKind, pa.Table] = {
            result.kind: result.rows,
            "outcomes": result.outcomes,
            "quarantine": quarantine_rows(plan, shard, result.quarantined, data.unknown),
        }
        receipt = ShardReceipt(
            run_id=plan.run_id,
            shard=shard.index,
            attempt=attempt,
            files={
                kind: stage(plan, shard, attempt, kind, table) for kind, table in tables.items()
            },
            counts=result.counts,
            seconds=time.perf_counter() - started,
            engine_seconds=result.engine_seconds,
            finished_at=time.time(),
            legal_mass_sum=result.legal_mass_sum,
            beam_widths=result.beam_widths,
            native_beams=result.native_beams,
        )
        files.write_record(receipt_path(plan, shard), receipt.model_dump(mode="json"))
    return receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """What a shard came to: the rows to publish, one outcome per user, and what was set aside."""

    kind: StagedKind
    rows: pa.Table
    outcomes: pa.Table
    quarantined: list[QuarantinedRow]
    counts: Counts
    engine_seconds: float
    legal_mass_sum: float = 0.0
    beam_widths: dict[int, int] = field(default_factory=dict)
    native_beams: dict[str, int] | None = None


def _recommend(
    plan: RunPlan,
    data: ShardInput,
    engine: Engine,
    catalog: Catalog,
    progress: Callable[[int], None],
) -> _Result:
    scores = score_shard(data, engine, catalog, plan.config.task, progress)
    quarantined = data.quarantined + scores.quarantined
    kept = ~scores.rejected
    widths, users = np.unique(scores.widths[kept & (scores.widths > 0)], return_counts=True)
    return _Result(
        kind="recommendations",
        rows=recommendation_rows(plan, data, scores, catalog),
        outcomes=outcome_rows(plan, data, scores),
        quarantined=quarantined,
        counts=_count(data, scores, _rows_set_aside(data, quarantined)),
        engine_seconds=scores.engine_seconds,
        legal_mass_sum=float(np.nansum(scores.legal_mass[kept])),
        beam_widths=dict(zip(widths.tolist(), users.tolist(), strict=True)),
        native_beams=None if scores.native is None else scores.native.as_dict(),
    )


def _embed(
    plan: RunPlan, data: ShardInput, engine: Engine, progress: Callable[[int], None]
) -> _Result:
    embedded = embed_shard(data, engine, progress)
    quarantined = data.quarantined + embedded.quarantined
    kept = ~embedded.rejected
    tokens = int(embedded.prompt_tokens[kept].sum())
    reused = int(embedded.reused_tokens[kept].sum())
    counts = data.counts.model_copy(
        update={
            "users_embedded": int(kept.sum()),
            "users_quarantined": data.counts.users_quarantined + int((~kept).sum()),
            "rows_staged": int(kept.sum()),
            "rows_quarantined": _rows_set_aside(data, quarantined),
            "prompt_tokens": tokens,
            "reused_tokens": reused,
            "truncated_tokens": int(embedded.truncated_tokens[kept].sum()),
            "rows_forwarded": tokens - reused,
            "rows_naive": tokens,
        }
    )
    return _Result(
        kind="embeddings",
        rows=embedding_rows(plan, data, embedded),
        outcomes=embedding_outcomes(plan, data, embedded),
        quarantined=quarantined,
        counts=counts,
        engine_seconds=embedded.engine_seconds,
    )


@contextmanager
def _shard_context(plan: RunPlan, shard: Shard) -> Iterator[None]:
    """Name the shard in any error raised inside."""
    where = f"{shard.name} of run {plan.run_id}"
    try:
        yield
    except NightshelfError as err:
        err.where = f"{err.where}; {where}" if err.where else where
        raise
    except BaseException as err:
        if not isinstance(err, Exception) and not is_panic(err):
            raise
        raise ShardFailedError(
            f"{shard.name} failed", got=f"{type(err).__name__}: {err}", where=f"run {plan.run_id}"
        ) from err


def _rows_set_aside(data: ShardInput, quarantined: list[QuarantinedRow]) -> int:
    return len(quarantined) + (len(data.unknown) if data.unknown is not None else 0)


def _count(data: ShardInput, scores: ShardScores, rows_quarantined: int) -> Counts:
    """The shard's counts. Candidates of users that failed in the engine are unused, not scored."""
    kept = ~scores.rejected
    lost = 0
    if data.users.candidates is not None:
        lost = int(data.users.candidates.scorable[scores.rejected].sum())
    before = data.counts
    return before.model_copy(
        update={
            "users_recommended": int((scores.returned[kept] > 0).sum()),
            "users_without_eligible": int((scores.returned[kept] == 0).sum()),
            "users_quarantined": before.users_quarantined + int(scores.rejected.sum()),
            "candidates_scored": before.candidates_scored - lost,
            "candidates_unused": before.candidates_unused + lost,
            "rows_staged": len(scores.user),
            "rows_quarantined": rows_quarantined,
            "users_exact": int((scores.exact & (scores.returned > 0))[kept].sum()),
            "prompt_tokens": int(scores.prompt_tokens[kept].sum()),
            "reused_tokens": int(scores.reused_tokens[kept].sum()),
            "truncated_tokens": int(scores.truncated_tokens[kept].sum()),
            "rows_forwarded": int(scores.rows.sum()),
            "rows_naive": int(scores.rows_naive.sum()),
            "users_searched": int((scores.search.rounds[kept] > 0).sum()),
            "users_stopped": int(scores.search.stopped[kept].sum()),
            "search_nodes": int(scores.search.nodes[kept].sum()),
            "search_rounds": int(scores.search.rounds[kept].sum()),
        }
    )


def _balance(result: _Result, shard: Shard) -> None:
    problems = result.counts.imbalances()
    rows = len(result.rows)
    if rows != result.counts.rows_staged:
        problems.append(f"rows written {rows} != rows ranked {result.counts.rows_staged}")
    if problems:
        raise AccountingError(
            f"{shard.name}: rows do not balance", got="; ".join(problems), do="Nothing was kept."
        )

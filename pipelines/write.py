"""Rows of a scored shard as Arrow tables, and their staged files.

Every attempt writes files of its own names; a file that no receipt names is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from pipelines import files
from pipelines.catalog import Catalog
from pipelines.rank import SOURCES
from pipelines.read import ShardInput, quarantine_json
from pipelines.score import ShardScores
from pipelines.validate import QuarantinedRow
from schemas.runs import RunPlan, Shard, StagedFile
from schemas.tables import QUARANTINE, outcomes_schema, recommendations_schema


def recommendation_rows(
    plan: RunPlan, shard: ShardInput, scores: ShardScores, catalog: Catalog
) -> pa.Table:
    """Long rows: one per recommendation, by user and rank."""
    schema = recommendations_schema(plan.user_id_type, plan.item_id_type)
    num = len(scores.user)
    return pa.table(
        {
            "user_id": shard.user_ids.take(pa.array(scores.user)),
            "rank": scores.rank,
            "item_id": catalog.item_ids.take(pa.array(scores.item)),
            "score": scores.score,
            "source": pa.array(SOURCES[scores.source], pa.string()),
            "exact": pa.array(scores.exact[scores.user]),
            "run_id": pa.repeat(plan.run_id, num) if num else pa.array([], pa.string()),
        }
    ).cast(schema)


def outcome_rows(plan: RunPlan, shard: ShardInput, scores: ShardScores) -> pa.Table:
    """One row per user that was not quarantined."""
    kept = np.flatnonzero(~scores.rejected)
    returned = scores.returned[kept]
    reason = _reasons(plan, shard, scores)[kept]
    mass = scores.legal_mass[kept]
    return pa.table(
        {
            "user_id": shard.user_ids.take(pa.array(kept)),
            "status": pa.array(
                np.where(returned > 0, "recommended", "nothing_eligible"), pa.string()
            ),
            "reason": pa.array(reason.tolist(), pa.string()),
            "returned": returned,
            "exact": pa.array(scores.exact[kept]),
            "legal_mass": pa.array(mass, mask=np.isnan(mass)),
            "prompt_tokens": scores.prompt_tokens[kept],
            "truncated_tokens": scores.truncated_tokens[kept],
            "rows_forwarded": scores.rows[kept],
        }
    ).cast(outcomes_schema(plan.user_id_type))


def _reasons(plan: RunPlan, shard: ShardInput, scores: ShardScores) -> np.ndarray:
    """Why a user got fewer than k items; None where it got k."""
    reason = np.full(len(scores.returned), None, dtype=object)
    short = scores.returned < shard.k
    if plan.config.task.generate is not None:
        reason[short & scores.exact] = "catalog_exhausted"
        reason[short & ~scores.exact] = "beam_exhausted"
        return reason
    candidates = shard.users.candidates
    assert candidates is not None, "a scoring run has candidates"
    reason[short] = "fewer_candidates_than_k"
    reason[short & (candidates.lengths == 0)] = "no_eligible_candidate"
    return reason


def quarantine_rows(plan: RunPlan, shard: Shard, rows: Iterable[QuarantinedRow]) -> pa.Table:
    """The quarantine table's rows of one shard."""
    records = [
        {
            "ds": plan.ds,
            "surface": plan.surface,
            "table": row.table,
            "key": row.key,
            "rule": row.rule,
            "message": row.message,
            "payload": quarantine_json(row.payload),
            "file": row.file,
            "run_id": plan.run_id,
            "shard": shard.index,
        }
        for row in rows
    ]
    return pa.Table.from_pylist(records, schema=QUARANTINE)


def stage(plan: RunPlan, shard: Shard, attempt: str, kind: str, table: pa.Table) -> StagedFile:
    """Write one staged file of an attempt."""
    relative = f"staged/{shard.name}-{attempt}-{kind}.parquet"
    path = files.join(plan.run_dir, relative)
    size = files.write_parquet(
        path, table, sorted_by="user_id" if "user_id" in table.column_names else None
    )
    return StagedFile(path=relative, rows=len(table), bytes=size, xxh3=files.hash_file(path))

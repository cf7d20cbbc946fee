"""Rows of a scored shard as Arrow tables, and their staged files.

Every attempt writes files of its own names; a file that no receipt names is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.tasks import columns_of, tasks_of
from pipelines.catalog.build import Catalog
from pipelines.inputs.read_batches import ShardInput, quarantine_json
from pipelines.inputs.row_rules import QuarantinedRow, UnknownItems
from pipelines.shards.embed import ShardEmbeddings
from pipelines.shards.rank import SOURCES
from pipelines.shards.score import ShardScores
from pipelines.storage import files
from schemas.runs import RunPlan, Shard, StagedFile
from schemas.tables import (
    QUARANTINE,
    embeddings_schema,
    outcomes_schema,
    recommendations_schema,
)


def recommendation_rows(
    plan: RunPlan, shard: ShardInput, scores: ShardScores, catalog: Catalog
) -> pa.Table:
    """Long rows: one per recommendation, by user and rank."""
    schema = recommendations_schema(plan.user_id_type, plan.item_id_type, columns_of(plan.config))
    num = len(scores.user)
    columns = {
        "user_id": shard.user_ids.take(pa.array(scores.user)),
        "rank": scores.rank,
        "item_id": catalog.item_ids.take(pa.array(scores.item)),
        "score": scores.score,
        "source": pa.array(SOURCES[scores.source], pa.string()),
        "exact": pa.array(scores.exact[scores.user]),
        "run_id": pa.repeat(plan.run_id, num) if num else pa.array([], pa.string()),
    }
    for task in tasks_of(plan.config):
        columns |= task.column_values(shard.users, scores.user, scores.labels)
    return pa.table(columns).cast(schema)


def embedding_rows(plan: RunPlan, shard: ShardInput, embedded: ShardEmbeddings) -> pa.Table:
    """One vector per user that was not quarantined."""
    kept = np.flatnonzero(~embedded.rejected)
    vectors = embedded.vectors[kept]
    width = vectors.shape[1]
    return pa.table(
        {
            "user_id": shard.user_ids.take(pa.array(kept)),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), width),
            "run_id": pa.repeat(plan.run_id, len(kept)) if len(kept) else pa.array([], pa.string()),
        }
    ).cast(embeddings_schema(plan.user_id_type, width))


def embedding_outcomes(plan: RunPlan, shard: ShardInput, embedded: ShardEmbeddings) -> pa.Table:
    """One row per user that was not quarantined."""
    kept = np.flatnonzero(~embedded.rejected)
    tokens = embedded.prompt_tokens[kept]
    return pa.table(
        {
            "user_id": shard.user_ids.take(pa.array(kept)),
            "status": pa.array(["embedded"] * len(kept), pa.string()),
            "reason": pa.nulls(len(kept), pa.string()),
            "returned": np.zeros(len(kept), dtype=np.int32),
            "exact": pa.array(np.zeros(len(kept), dtype=bool)),
            "legal_mass": pa.nulls(len(kept), pa.float32()),
            "prompt_tokens": tokens,
            "reused_tokens": embedded.reused_tokens[kept],
            "truncated_tokens": embedded.truncated_tokens[kept],
            "rows_forwarded": tokens - embedded.reused_tokens[kept],
        }
    ).cast(outcomes_schema(plan.user_id_type))


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
            "reused_tokens": scores.reused_tokens[kept],
            "truncated_tokens": scores.truncated_tokens[kept],
            "rows_forwarded": scores.rows[kept],
        }
    ).cast(outcomes_schema(plan.user_id_type))


def _reasons(plan: RunPlan, shard: ShardInput, scores: ShardScores) -> np.ndarray:
    """Why a user got fewer than k items, or maybe others; None where it got its best k."""
    reason = np.full(len(scores.returned), None, dtype=object)
    short = scores.returned < shard.k
    if plan.config.task.searches_catalog:
        reason[short & scores.exact] = "catalog_exhausted"
        reason[short & ~scores.exact] = "beam_exhausted"
        reason[scores.search.stopped & ~scores.exact] = "budget"
        reason[scores.unscored] = "model_gave_no_score"
        return reason
    candidates = shard.users.candidates
    assert candidates is not None, "a scoring run has candidates"
    reason[short] = "fewer_candidates_than_k"
    reason[short & (candidates.scorable == 0)] = "no_eligible_candidate"
    return reason


def quarantine_rows(
    plan: RunPlan, shard: Shard, rows: Iterable[QuarantinedRow], unknown: UnknownItems | None
) -> pa.Table:
    """The quarantine table's rows of one shard."""
    records = [
        {
            "table": row.table,
            "key": row.key,
            "rule": row.rule,
            "message": row.message,
            "payload": quarantine_json(row.payload),
            "file": row.file,
        }
        for row in rows
    ]
    columns = [
        name for name in QUARANTINE.names if name not in ("ds", "surface", "run_id", "shard")
    ]
    own = pa.schema([QUARANTINE.field(name) for name in columns])
    table = pa.Table.from_pylist(records, schema=own)
    if unknown is not None and len(unknown):
        table = pa.concat_tables([_unknown_rows(unknown, own), table])
    constants: dict[str, str | int] = {
        "ds": plan.ds,
        "surface": plan.surface,
        "run_id": plan.run_id,
        "shard": shard.index,
    }
    for name, value in constants.items():
        field = QUARANTINE.field(name)
        table = table.append_column(field, pa.repeat(pa.scalar(value, field.type), len(table)))
    return table.select(QUARANTINE.names)


def _unknown_rows(unknown: UnknownItems, schema: pa.Schema) -> pa.Table:
    """A row per candidate; each distinct item is written as JSON once."""
    encoded = pc.dictionary_encode(unknown.items, null_encoding="encode")
    texts = [quarantine_json({"item_id": item}) for item in encoded.dictionary.to_pylist()]
    num = len(unknown)
    columns = {
        "table": pa.repeat("candidates", num),
        "key": unknown.keys,
        "rule": pa.repeat("unknown_item", num),
        "message": pa.repeat("the candidate is not in the catalog", num),
        "payload": pa.array(texts, pa.string()).take(encoded.indices),
        "file": pa.nulls(num, pa.string()),
    }
    return pa.table([columns[name] for name in schema.names], schema=schema)


def stage(plan: RunPlan, shard: Shard, attempt: str, kind: str, table: pa.Table) -> StagedFile:
    """Write one staged file of an attempt."""
    relative = f"staged/{shard.name}-{attempt}-{kind}.parquet"
    path = files.join(plan.run_dir, relative)
    written = files.write_table(
        path, table, sorted_by="user_id" if "user_id" in table.column_names else None
    )
    return StagedFile(path=relative, rows=len(table), bytes=written.bytes, xxh3=written.xxh3)

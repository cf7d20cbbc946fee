"""What a Delta table asks of who writes it, and whether a publish does it."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from schemas.errors import ConfigError

# Features of the protocol that ask nothing of a publish, which writes whole files and removes whole
# files, or that are looked at one by one below.
_FEATURES = {
    "allowColumnDefaults",
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",
    "domainMetadata",
    "generatedColumns",
    "identityColumns",
    "invariants",
    "timestampNtz",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
_OF_COLUMNS = {
    "delta.invariants": "an invariant",
    "delta.generationExpression": "a generated value",
    "delta.identity.start": "an identity",
    "CURRENT_DEFAULT": "a default",
}


def check_features(table: DeltaTable, where: str) -> None:
    """Raise `ConfigError` for a table that cannot be published to: see docs/tables.md."""
    partitions = table.metadata().partition_columns
    if partitions != ["ds", "surface"]:
        raise ConfigError(
            "the Delta table has other partitions",
            expected="partitioned by ds, surface",
            got=", ".join(partitions) or "none",
            where=where,
            do="Publish to another table.",
        )
    for what, remedy in _problems(table):
        raise ConfigError(
            "the Delta table asks for what a publish does not do", got=what, where=where, do=remedy
        )


def _problems(table: DeltaTable) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    protocol, settings = table.protocol(), table.metadata().configuration
    features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
    for name in sorted(features - _FEATURES):
        found.append(
            (
                f"table feature {name}",
                f"ALTER TABLE … DROP FEATURE {name}, or publish to another table.",
            )
        )
    if settings.get("delta.enableDeletionVectors", "").lower() == "true":
        found.append(
            (
                "delta.enableDeletionVectors = true",
                "Set it to false and rewrite the table (REORG … APPLY (PURGE)), or publish to "
                "another table.",
            )
        )
    if settings.get("delta.appendOnly", "").lower() == "true":
        found.append(
            (
                "delta.appendOnly = true: a publish replaces the rows of its date",
                "Set delta.appendOnly to false, or publish to another table.",
            )
        )
    if settings.get("delta.columnMapping.mode", "none").lower() != "none":
        mode = settings["delta.columnMapping.mode"]
        found.append(
            (f"delta.columnMapping.mode = {mode}", "Publish to a table without column mapping.")
        )
    for name in sorted(settings):
        if name.startswith("delta.constraints."):
            found.append(
                (
                    f"CHECK constraint {name.removeprefix('delta.constraints.')}: {settings[name]}",
                    "Drop the constraint, or publish to another table: rows are not held against "
                    "it.",
                )
            )
    fields: list[dict[str, Any]] = json.loads(table.schema().to_json())["fields"]
    for field in fields:
        for key, word in _OF_COLUMNS.items():
            if key in (field.get("metadata") or {}):
                found.append(
                    (
                        f"column {field['name']!r} with {word}",
                        "Publish to a table whose columns are plain.",
                    )
                )
    return found


def statistics(data: bytes) -> str:
    """Statistics of a data file as the log keeps them: rows, and bounds of plain columns."""
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        meta = file.metadata
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for column in range(meta.num_columns):
        name = meta.schema.column(column).path
        groups = [meta.row_group(g).column(column).statistics for g in range(meta.num_row_groups)]
        if "." in name or not groups or not all(s is not None and s.has_null_count for s in groups):
            continue
        nulls[name] = sum(s.null_count for s in groups)
        bounds = [s for s in groups if s.has_min_max]
        if len(bounds) == len(groups) and isinstance(bounds[0].min, str | int):
            least[name] = min(s.min for s in bounds)
            most[name] = max(s.max for s in bounds)
    return json.dumps(
        {"numRecords": meta.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    )

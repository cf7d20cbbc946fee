"""Audit a finished run before anything is published. A gate that does not pass refuses the run.

The staged files are read back from disk, so that what is checked is what would be published.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow.compute as pc

from pipelines import files
from pipelines.catalog import Catalog
from pipelines.eligibility import eligible_items
from pipelines.items import open_items
from pipelines.prepare import shards_of
from pipelines.read import eligibility_columns
from schemas.runs import AuditReport, Counts, GateResult, RunPlan, Shard, ShardReceipt
from schemas.tables import EXCLUDED_LIST


def audit_run(plan: RunPlan, receipts: list[ShardReceipt]) -> AuditReport:
    """Apply every gate to the staged rows of a run that has all its receipts."""
    counts = Counts.total(receipt.counts for receipt in receipts)
    gates = [
        _conservation(plan, counts, receipts),
        _staged_files(plan, receipts),
        *(_embedding_gates if plan.config.task.embed else _row_gates)(plan, receipts),
        _at_least(
            "coverage",
            (counts.users_recommended + counts.users_embedded) / max(counts.users_in, 1),
            plan.config.audit.min_coverage,
            "share of users with a result",
        ),
        _at_most(
            "quarantine_rate",
            counts.users_quarantined / max(counts.users_in, 1),
            plan.config.audit.max_quarantine_rate,
            "share of users quarantined",
        ),
    ]
    return AuditReport(run_id=plan.run_id, gates=tuple(gates))


def _gate(name: str, bad: int, detail: str) -> GateResult:
    return GateResult(gate=name, passed=bad == 0, value=float(bad), allowed="0", detail=detail)


def _at_least(name: str, value: float, limit: float, detail: str) -> GateResult:
    return GateResult(
        gate=name, passed=value >= limit, value=value, allowed=f">= {limit}", detail=detail
    )


def _at_most(name: str, value: float, limit: float, detail: str) -> GateResult:
    return GateResult(
        gate=name, passed=value <= limit, value=value, allowed=f"<= {limit}", detail=detail
    )


def _conservation(plan: RunPlan, counts: Counts, receipts: list[ShardReceipt]) -> GateResult:
    """Every user of the input is recommended, quarantined or without anything eligible."""
    problems = counts.imbalances()
    listed = plan.inputs["users"].rows
    if counts.users_in != listed:
        problems.append(f"users in shards {counts.users_in} != rows of the users table {listed}")
    if sorted(receipt.shard for receipt in receipts) != list(range(plan.num_shards)):
        problems.append("the receipts are not one per shard")
    return _gate("conservation", len(problems), "; ".join(problems))


def _staged_files(plan: RunPlan, receipts: list[ShardReceipt]) -> GateResult:
    """Staged files are the ones the receipts describe, bit for bit."""
    bad = [
        file.path
        for receipt in receipts
        for file in receipt.files.values()
        if files.hash_file(files.join(plan.run_dir, file.path)) != file.xxh3
    ]
    return _gate("staged_files", len(bad), ", ".join(bad[:3]))


def _row_gates(plan: RunPlan, receipts: list[ShardReceipt]) -> list[GateResult]:
    """Checks on the rows. A user is in one shard, so that each shard is checked on its own."""
    catalog = open_items(plan)
    assert catalog is not None, "recommendations need a catalog"
    items = pl.Series("item_id", pl.from_arrow(catalog.item_ids))
    shards = shards_of(plan)
    details = {
        "duplicates": "a user has an item more than once",
        "ranks": "ranks are not 1, 2, 3, … per user",
        "scores": "a score is NaN, infinite, above 0, or above the one before it",
        "catalog_validity": "an item is not in the catalog",
        "excluded_items": "a user got an item that is excluded for it",
        "ineligible_items": "a user got an item that task.eligibility does not allow it",
        "rows": "rows differ from the receipts",
    }
    bad = dict.fromkeys(details, 0)
    for receipt in receipts:
        staged = receipt.files["recommendations"]
        rows = pl.read_parquet(files.join(plan.run_dir, staged.path))
        shard = pl.read_parquet(shards[receipt.shard].path, columns=["user_id", EXCLUDED_LIST])
        excluded = (
            shard.explode(EXCLUDED_LIST).drop_nulls().rename({EXCLUDED_LIST: "item_id"}).unique()
        )
        bad["rows"] += abs(len(rows) - receipt.counts.rows_staged)
        bad["duplicates"] += len(rows) - rows.select("user_id", "item_id").n_unique()
        bad["ranks"] += rows.filter(
            pl.col("rank") != pl.int_range(1, pl.len() + 1).over("user_id")
        ).height
        above = pl.col("score").shift(1).over("user_id")
        bad["scores"] += rows.filter(
            pl.col("score").is_nan()
            | pl.col("score").is_infinite()
            | (pl.col("score") > 0)
            | (pl.col("score") > above).fill_null(value=False)
        ).height
        bad["catalog_validity"] += rows.filter(~pl.col("item_id").is_in(items.implode())).height
        bad["ineligible_items"] += _ineligible(plan, shards[receipt.shard], rows, catalog)
        bad["excluded_items"] += rows.join(excluded, on=["user_id", "item_id"], how="semi").height
    return [_gate(name, count, details[name]) for name, count in bad.items()]


def _embedding_gates(plan: RunPlan, receipts: list[ShardReceipt]) -> list[GateResult]:
    """Checks on embeddings, shard by shard."""
    details = {
        "duplicates": "a user stands more than once",
        "vectors": "a vector holds NaN or Inf",
        "widths": "vectors have another width than those of the first shard",
        "rows": "rows differ from the receipts",
    }
    bad = dict.fromkeys(details, 0)
    width: int | None = None
    for receipt in receipts:
        table = files.read_parquet(files.join(plan.run_dir, receipt.result.path))
        column = table.column("embedding").combine_chunks()
        width = width or column.type.list_size
        bad["rows"] += abs(len(table) - receipt.counts.rows_staged)
        bad["duplicates"] += len(table) - pc.count_distinct(table.column("user_id")).as_py()
        bad["vectors"] += int((~np.isfinite(column.flatten().to_numpy())).sum())
        bad["widths"] += int(column.type.list_size != width)
    return [_gate(name, count, details[name]) for name, count in bad.items()]


def _ineligible(plan: RunPlan, shard: Shard, rows: pl.DataFrame, catalog: Catalog) -> int:
    """Rows whose item the user's segment may not get."""
    rule = plan.config.task.eligible
    if rule is None or rows.is_empty():
        return 0
    users = files.read_parquet(shard.path)
    at = pc.index_in(rows["user_id"].to_arrow().cast(users["user_id"].type), users["user_id"])
    item = catalog.positions(rows["item_id"].to_arrow().cast(catalog.item_ids.type))
    allowed = eligible_items(rule, eligibility_columns(rule, users.take(at)), catalog.table)
    known = np.flatnonzero(item >= 0)
    return int((~allowed.of(known, item[known])).sum())

"""The files that a run's finished shards left, as frames that polars streams."""

from __future__ import annotations

import polars as pl

from pipelines import files
from pipelines.prepare import shards_of
from pipelines.shard_columns import scan as scan_input
from pipelines.shard_columns import shard_columns, users_columns
from schemas.errors import StorageError
from schemas.runs import RunManifest, RunPlan, StagedKind
from schemas.tables import DUPLICATE


def check_staged(manifest: RunManifest) -> None:
    """Raise `StorageError` when files that receipts name are gone: `nightshelf gc` removes them."""
    run_dir = manifest.plan.run_dir
    there = set(files.list_names(files.join(run_dir, "staged")))
    named = {f.path.rpartition("/")[2] for r in manifest.shards for f in r.files.values()}
    if missing := sorted(named - there):
        raise StorageError(
            "staged files of the run are gone",
            got=f"{len(missing)} of {len(named)} files, {missing[0]} among them",
            where=run_dir,
            do="A report reads them. Look at the page that the run itself wrote, report.html.",
        )


def scan(manifest: RunManifest, kind: StagedKind) -> pl.LazyFrame | None:
    """Rows of one kind of all finished shards; None where there are none of the kind."""
    paths = [
        files.join(manifest.plan.run_dir, receipt.files[kind].path)
        for receipt in manifest.shards
        if kind in receipt.files
    ]
    return pl.scan_parquet(paths, hive_partitioning=False) if paths else None


def scan_shards(manifest: RunManifest) -> pl.LazyFrame | None:
    """The prepared inputs of the finished shards; None where they were removed."""
    done = {receipt.shard for receipt in manifest.shards}
    if manifest.plan.config.inputs.self_contained:
        return _scan_own_files(manifest.plan, done)
    there = set(files.list_names(files.join(manifest.plan.run_dir, "shards")))
    paths = [s.path for s in shards_of(manifest.plan) if s.index in done]
    if not paths or any(path.rpartition("/")[2] not in there for path in paths):
        return None
    return pl.scan_parquet(paths, hive_partitioning=False)


def _scan_own_files(plan: RunPlan, done: set[int]) -> pl.LazyFrame | None:
    """The same of a users table whose files are the shards, as far as they are what they were."""
    columns, files_then = users_columns(plan), plan.inputs["users"].files
    frames = []
    for shard in shards_of(plan):
        if shard.index not in done or not files.exists(shard.path):
            continue
        if files.describe_file(shard.path, "users")[0].version != files_then[shard.index].version:
            continue
        rows = shard_columns(plan, scan_input(shard.path), columns)
        again = pl.col("user_id").is_first_distinct().not_().alias(DUPLICATE)
        frames.append(rows.with_columns(again))
    return pl.concat(frames, how="vertical_relaxed") if frames else None

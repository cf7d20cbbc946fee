"""A Hive-style Parquet table: `<path>/ds=…/surface=…/part-<run>-<shard>.parquet`, `_SUCCESS` last.

Files are whole when they appear and carry the run in their name. Order of a publish: `_SUCCESS`
goes, the run's files come, files of other runs go, `_SUCCESS` comes. A crash anywhere leaves a
partition without `_SUCCESS`, and publishing again completes it; publishing a run twice, or a new
run over an old one, leaves exactly one set of rows. Which files make up a partition is also
recorded outside the table, in the work folder (`published/`), because a folder that holds anything
but Parquet files and an empty `_SUCCESS` cannot be read by polars as a folder.
"""

from __future__ import annotations

import time
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from pipelines import files
from schemas.runs import Published, RunPlan, ShardReceipt

SUCCESS = "_SUCCESS"


def partition_name(ds: str, surface: str) -> str:
    """`ds=…/surface=…`, values escaped as Hive does (URL-quoted)."""
    return f"ds={quote(ds, safe='')}/surface={quote(surface, safe=' ')}"


def record_path(plan: RunPlan) -> str:
    """Where the record of the partition's current run is."""
    name = partition_name(plan.ds, plan.surface).replace("/", "-")
    return files.join(plan.config.run.work_dir, "published", f"{name}.json")


def publish_parquet(plan: RunPlan, receipts: list[ShardReceipt]) -> Published:
    """Replace the partition's rows by the run's, and say what is there now.

    Raises:
        StorageError: a file could not be written; publishing again completes the partition.
    """
    partition = files.join(plan.config.output.path, partition_name(plan.ds, plan.surface))
    before = files.list_names(partition)
    if SUCCESS in before:
        files.remove(files.join(partition, SUCCESS))
    names, rows = [], 0
    for receipt in sorted(receipts, key=lambda r: r.shard):
        staged = receipt.result
        if staged.rows == 0:
            continue
        name = f"part-{plan.run_id}-{receipt.shard:05d}.parquet"
        table = files.read_parquet(files.join(plan.run_dir, staged.path))
        if plan.config.output.layout == "wide":
            table = to_wide(table)
        files.write_parquet(files.join(partition, name), table, sorted_by="user_id")
        names.append(name)
        rows += len(table)
    for name in files.list_names(partition):
        if name not in names and name != SUCCESS:
            files.remove(files.join(partition, name))
    published = Published(
        table=plan.config.output.path,
        partition=partition,
        files=tuple(names),
        rows=rows,
        run_id=plan.run_id,
    )
    record = {**published.model_dump(mode="json"), "published_at": time.time()}
    files.write_json(record_path(plan), record)
    files.write_bytes(files.join(partition, SUCCESS), b"")
    return published


def to_wide(table: pa.Table) -> pa.Table:
    """One row per user: `items list<struct<item_id, score, source>>` in rank order, `exact`,
    `run_id`. A labelling task adds `labels` to the struct.
    """
    users = table.column("user_id").combine_chunks()
    names = [n for n in ("item_id", "score", "source", "labels") if n in table.column_names]
    struct = pa.StructArray.from_arrays(
        [table.column(name).combine_chunks() for name in names], names=names
    )
    starts = pc.equal(table.column("rank"), 1).combine_chunks()
    first = pc.indices_nonzero(starts).cast(pa.int32())
    offsets = pa.concat_arrays([first, pa.array([len(table)], pa.int32())])
    return pa.table(
        {
            "user_id": users.take(first),
            "items": pa.ListArray.from_arrays(offsets, struct),
            "exact": table.column("exact").combine_chunks().take(first),
            "run_id": table.column("run_id").combine_chunks().take(first),
        }
    )

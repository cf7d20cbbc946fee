"""The rows of a run, shard by shard, as a table holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines import files
from schemas.runs import RunPlan, ShardReceipt, StagedFile

_GROUP_BYTES = 64 << 20  # of a row group, before compression


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRows:
    """What a run publishes. Its files are read one shard at a time, and again for each try."""

    plan: RunPlan
    receipts: tuple[ShardReceipt, ...]
    quarantine: bool = False  # the rows that were set aside instead of the result

    def _file(self, receipt: ShardReceipt) -> StagedFile:
        return receipt.files["quarantine"] if self.quarantine else receipt.result

    @property
    def rows(self) -> int:
        """Rows of the published table; one per user in the wide layout."""
        if self.quarantine or self.plan.config.output.layout == "long":
            return sum(self._file(receipt).rows for receipt in self.receipts)
        paths = (files.join(self.plan.run_dir, r.result.path) for r in self.receipts)
        firsts = (pc.equal(files.read_parquet(path, ["rank"])["rank"], 1) for path in paths)
        return sum(int(pc.sum(first).as_py() or 0) for first in firsts)

    def shards(self) -> Iterator[tuple[int, pa.Table]]:
        """Shards that have rows, in order; the first one, empty, where none has."""
        ordered = sorted(self.receipts, key=lambda receipt: receipt.shard)
        filled = [receipt for receipt in ordered if self._file(receipt).rows] or ordered[:1]
        for receipt in filled:
            table = files.read_parquet(files.join(self.plan.run_dir, self._file(receipt).path))
            if self.quarantine:
                table = table.drop_columns(["ds", "surface"])  # they are the partition
            elif self.plan.config.output.layout == "wide":
                table = to_wide(table)
            yield receipt.shard, table

    def schema(self) -> pa.Schema:
        """Columns of the shards."""
        return next(self.shards())[1].schema


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


def with_partition(table: pa.Table, ds: str, surface: str) -> pa.Table:
    """The rows with `ds` and `surface` as columns, as Iceberg and Delta tables hold them.

    Every column may be null: a column that another task adds later is null in older rows.
    """
    constants = [pa.repeat(pa.scalar(value, pa.string()), len(table)) for value in (ds, surface)]
    names = ["ds", "surface", *table.column_names]
    fields = [pa.field(n, pa.string()) for n in names[:2]]
    fields += [field.with_nullable(True) for field in table.schema]
    return pa.table([*constants, *table.columns], schema=pa.schema(fields))


def rows_per_group(schema: pa.Schema) -> int:
    """Rows of a row group of about 64 MiB: the default of a million is 4 GiB of 1024-d vectors."""
    widths = [f.type.list_size for f in schema if pa.types.is_fixed_size_list(f.type)]
    per_row = 100 + 4 * sum(widths)
    return max(1024, int(_GROUP_BYTES // per_row))


def write_rows(stream: Any, table: pa.Table) -> None:
    """Write a Parquet file for point lookups: sorted by user, with statistics of columns and pages.

    The rows are in that order already; those of a quarantine are in none.
    """
    order = [
        pq.SortingColumn(place)
        for place, name in enumerate(table.column_names)
        if name == "user_id"
    ]
    pq.write_table(
        table,
        stream,
        compression="zstd",
        row_group_size=max(1, min(len(table), rows_per_group(table.schema))),
        sorting_columns=order or None,
        write_page_index=True,
    )

"""The rows of a run, shard by shard, as a table holds them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine.tasks import columns_of
from pipelines.storage import files
from pipelines.storage.files import Written
from schemas.runs import RunPlan, ShardReceipt, StagedFile
from schemas.settings import RunConfig
from schemas.tables import IdType, embeddings_schema, recommendations_schema

_GROUP_BYTES = 64 << 20  # of a row group, before compression


class Rows(Protocol):
    """Rows of one run, to be a partition's only ones."""

    @property
    def run_id(self) -> str:
        """The run that stands in every row."""

    @property
    def layout(self) -> str:
        """`long` or `wide`."""

    @property
    def parts(self) -> int:
        """How many `shards` gives."""

    def shards(self) -> Iterator[tuple[int, pa.Table]]:
        """Numbered parts without `ds` and `surface`, at least one, which may be empty."""

    def schema(self) -> pa.Schema:
        """Columns of the parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRows:
    """What a run publishes. Its files are read one shard at a time, and again for each try."""

    plan: RunPlan
    receipts: tuple[ShardReceipt, ...]
    quarantine: bool = False  # the rows that were set aside instead of the result

    def _file(self, receipt: ShardReceipt) -> StagedFile:
        return receipt.files["quarantine"] if self.quarantine else receipt.result

    @property
    def run_id(self) -> str:
        """See `Rows`."""
        return self.plan.run_id

    @property
    def layout(self) -> str:
        """See `Rows`."""
        return self.plan.config.output.layout

    def _filled(self) -> list[ShardReceipt]:
        ordered = sorted(self.receipts, key=lambda receipt: receipt.shard)
        return [receipt for receipt in ordered if self._file(receipt).rows] or ordered[:1]

    @property
    def parts(self) -> int:
        """See `Rows`."""
        return len(self._filled())

    def shards(self) -> Iterator[tuple[int, pa.Table]]:
        """Shards that have rows, in order; the first one, empty, where none has."""
        for receipt in self._filled():
            staged = self._file(receipt)
            proof = Written(staged.bytes, staged.xxh3)  # what is published is what was audited
            table = files.read_parquet(files.join(self.plan.run_dir, staged.path), proof=proof)
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


def published_schema(
    config: RunConfig, user_id: IdType, item_id: IdType, width: int | None = None
) -> pa.Schema:
    """Columns that a run of the configuration publishes, without `ds` and `surface`.

    Args:
        width: of its embeddings; any where it is not known.
    """
    if not config.task.gives_lists:
        return embeddings_schema(user_id, width or 1)
    long = recommendations_schema(user_id, item_id, columns_of(config))
    return to_wide(long.empty_table()).schema if config.output.layout == "wide" else long


def with_partition(table: pa.Table, ds: str, surface: str) -> pa.Table:
    """The rows with `ds` and `surface` as columns, as Iceberg and Delta tables hold them.

    Every column may be null: a column that another task adds later is null in older rows.
    """
    constants = [pa.repeat(pa.scalar(value, pa.string()), len(table)) for value in (ds, surface)]
    names = ["ds", "surface", *table.column_names]
    fields = [pa.field(n, pa.string()) for n in names[:2]]
    fields += [field.with_nullable(True) for field in table.schema]
    return pa.table([*constants, *table.columns], schema=pa.schema(fields))


def as_lists(rows: pa.Table) -> pa.Table:
    """Vectors as lists without a fixed length, the only ones that lake tables know."""
    fields = [
        field.with_type(pa.list_(field.type.value_type))
        if pa.types.is_fixed_size_list(field.type)
        else field
        for field in rows.schema
    ]
    return rows.cast(pa.schema(fields))


def fitted(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with the columns of a table, in its order and types; what they lack is null."""
    columns = [
        rows[field.name].cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def rows_per_group(schema: pa.Schema) -> int:
    """Rows of a row group of about 64 MiB: the default of a million is 4 GiB of 1024-d vectors."""
    widths = [f.type.list_size for f in schema if pa.types.is_fixed_size_list(f.type)]
    per_row = 100 + 4 * sum(widths)
    return max(1024, int(_GROUP_BYTES // per_row))


def encoded(table: pa.Table) -> bytes:
    """The rows as a Parquet file for point lookups; see `write_rows`."""
    buffer = io.BytesIO()
    write_rows(buffer, table)
    return buffer.getvalue()


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
        write_page_checksum=True,
    )

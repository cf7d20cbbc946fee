"""Rows of input tables: of the columns that a run reads, and of no other.

Everything else that a file holds is never opened: a column of a type that nobody here knows, a name
that stands twice, an encrypted column. So Arrow takes the columns out of the file by their place,
and polars sees what was taken out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from polars.io.plugins import register_io_source

from pipelines.sources import input_files
from pipelines.sources.column_values import converted
from pipelines.sources.parquet_leaves import leaves
from pipelines.storage import files
from pipelines.storage.storage_errors import translate
from schemas.errors import NightshelfError, TableError

_BATCH_BYTES = 16 << 20  # about as much of a file is in memory at once
_MOST_ROWS, _FEWEST_ROWS = 1 << 16, 256
_BUFFER = 8 << 20  # of one column, while it is read


@dataclass(frozen=True, slots=True)
class Wanted:
    """A column to read: `source` of the file becomes `name`, of type `dtype`. A file without it
    gives nulls.
    """

    name: str
    source: str
    dtype: pa.DataType


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive rows of a file; `number` is that of the first."""

    path: str
    number: int
    first: int = 0
    rows: int | None = None  # None: to the end


def scan_columns(
    table: str,
    pieces: Sequence[Piece],
    wanted: Sequence[Wanted],
    *,
    numbers: str | None = None,
    paths: str | None = None,
) -> pl.LazyFrame:
    """Rows of many files as one frame, which streams: never more than some rows of one file are in
    memory.

    Args:
        table: its name in errors.
        pieces: what to read, in order.
        wanted: which columns.
        numbers, paths: names of the columns to add, with each row's number and file.

    Raises:
        TableError: when rows are read; see `batches`.
    """
    empty = pa.schema([(one.name, one.dtype) for one in wanted]).empty_table()
    frame = pl.from_arrow(empty)
    assert isinstance(frame, pl.DataFrame), "a table is a frame"
    schema = dict(frame.schema)
    if numbers is not None:
        schema[numbers] = pl.Int64()
    if paths is not None:
        schema[paths] = pl.String()

    def rows(
        columns: list[str] | None, predicate: pl.Expr | None, most: int | None, _size: int | None
    ) -> Iterator[pl.DataFrame]:
        asked = [one for one in wanted if columns is None or one.name in columns]
        asked = asked or list(wanted[:1])  # a frame of no column has no rows
        for piece in pieces:
            number = piece.number
            for batch in batches(table, piece, asked):
                found = _frame(batch)
                if numbers is not None:
                    found = found.with_columns(
                        pl.int_range(number, number + len(found), dtype=pl.Int64).alias(numbers)
                    )
                if paths is not None:
                    found = found.with_columns(pl.lit(piece.path).alias(paths))
                number += len(found)
                if most is not None:
                    found = found.head(most)
                    most -= len(found)
                if predicate is not None:
                    found = found.filter(predicate)
                yield found if columns is None else found.select(columns)
                if most == 0:
                    return

    return register_io_source(rows, schema=schema)


def _frame(batch: pa.RecordBatch) -> pl.DataFrame:
    frame = pl.from_arrow(batch)
    assert isinstance(frame, pl.DataFrame), "a batch is a frame"
    return frame


def read_columns(
    table: str, path: str, wanted: Sequence[Wanted], rows: int | None = None
) -> pa.Table:
    """A whole file, or its first rows; see `batches`."""
    schema = pa.schema([(one.name, one.dtype) for one in wanted])
    return pa.Table.from_batches(batches(table, Piece(path, 0, rows=rows), wanted), schema)


def batches(table: str, piece: Piece, wanted: Sequence[Wanted]) -> Iterator[pa.RecordBatch]:
    """The rows of a piece, some at a time, as `wanted` has them.

    Raises:
        TableError: rows cannot be decoded, a column is encrypted, or a value does not fit its
            type; names the file.
        StorageError: the file could not be had.
    """
    schema = pa.schema([(one.name, one.dtype) for one in wanted])
    try:
        for batch in raw_batches(piece, list(dict.fromkeys(one.source for one in wanted))):
            columns = [
                converted(batch.column(one.source), one.dtype, one.source, piece.path)
                if one.source in batch.schema.names
                else pa.nulls(len(batch), one.dtype)
                for one in wanted
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)
    except TableError as err:
        if not err.what.startswith(f"{table}: "):
            err.what = f"{table}: {err.what}"
        raise
    except NightshelfError:
        raise
    except Exception as err:  # of Arrow, or of a store's client
        if files.is_damage(err):
            raise input_files.unreadable(table, piece.path, err) from err
        if (ours := translate(err, piece.path)) is None:
            raise
        raise ours from err


def raw_batches(piece: Piece, sources: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a piece as the file has them, with those of `sources` that it has."""
    fs, inside = files.filesystem(piece.path)
    with fs.open(inside, "rb") as handle:
        parquet = pq.ParquetFile(
            handle, pre_buffer=False, buffer_size=_BUFFER, page_checksum_verification=True
        )
        schema, footer = parquet.schema_arrow, parquet.metadata
        columns = leaves(schema, sources)
        begin, left = 0, footer.num_rows - piece.first if piece.rows is None else piece.rows
        for group in range(footer.num_row_groups):
            rows = footer.row_group(group).num_rows
            skip = max(0, piece.first - begin)
            begin += rows
            if skip >= rows or left <= 0:
                continue
            size, read = _rows_at_once(footer.row_group(group)), 0
            # Without threads: one that still reads ahead when the process ends takes it down.
            for batch in parquet.reader.iter_batches(size, [group], columns, use_threads=False):
                read += len(batch)
                part = batch.slice(skip, left)
                skip = max(0, skip - len(batch))
                left -= len(part)
                if len(part):
                    yield part
            if read < rows and left > 0:
                # The library stops without a word where one column ends before the others.
                raise pa.ArrowInvalid(f"row group {group} gives {read} of its {rows} rows")


def _rows_at_once(group: pq.RowGroupMetaData) -> int:
    """So many rows that a batch fits in memory, whatever they hold."""
    each = max(1, int(group.total_byte_size) // max(1, int(group.num_rows)))
    return max(_FEWEST_ROWS, min(_MOST_ROWS, _BATCH_BYTES // each))

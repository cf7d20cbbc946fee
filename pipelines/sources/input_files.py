"""Input tables as files: what is at a path, its schema and statistics, and its first rows.

Parquet that somebody else wrote. A run's own files are those of pipelines/storage/files.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.sources.copies import version_of_copy
from pipelines.sources.locate import list_parquet
from pipelines.sources.parquet_leaves import leaves, mark_encrypted, says_encrypted
from pipelines.storage.files import filesystem, first_line, is_damage, retried
from pipelines.storage.storage_errors import translated
from schemas.errors import TableError, quoted
from schemas.runs import InputFile

__all__ = [
    "column_range",
    "describe_file",
    "first_list_lengths",
    "is_parquet",
    "list_parquet",
    "read_head",
    "unreadable",
]

_MAGIC = (b"PAR1", b"PARE")  # the second: with an encrypted footer


@retried
def describe_file(path: str, table: str) -> tuple[InputFile, pa.Schema]:
    """Size, rows, version and Arrow schema of one Parquet file.

    Raises:
        TableError: the file is empty or not Parquet.
    """
    fs, inside = filesystem(path)
    try:
        info = fs.info(inside)
        if info["size"] == 0:
            raise TableError(
                f"{table}: the file is empty (0 bytes)", expected="a Parquet file", where=path
            )
        with fs.open(inside, "rb") as handle:
            _check_magic(handle, path, table)
            parquet = pq.ParquetFile(handle)
            rows, schema = parquet.metadata.num_rows, parquet.schema_arrow
            schema = mark_encrypted(handle, parquet, schema)
            _ = schema.names  # of which each is text, or this fails
    except (OSError, pa.ArrowException, UnicodeDecodeError) as err:
        if says_encrypted(err):
            raise encrypted(table, path, err) from err
        raise TableError(
            f"{table}: the file cannot be read as Parquet", got=first_line(err), where=path
        ) from err
    return InputFile(path=path, bytes=info["size"], rows=rows, version=_version(path, info)), schema


@retried
def file_version(path: str) -> str:
    """The version of a file now, as `describe_file` gives it.

    Raises:
        MissingFileError: it is gone.
    """
    fs, inside = filesystem(path)
    with translated(path):
        fs.invalidate_cache()
        return _version(path, fs.info(inside))


def _version(path: str, info: dict[str, Any]) -> str:
    copied = version_of_copy(path)
    if copied is not None:
        return f"{copied}-{info['size']}"
    version = info.get("ETag") or info.get("etag") or f"{info['size']}-{info.get('mtime', 0):.6f}"
    return str(version)


@retried
def is_parquet(path: str) -> bool:
    """Whether a file begins as Parquet does."""
    fs, inside = filesystem(path)
    with fs.open(inside, "rb") as handle:
        return handle.read(4) in _MAGIC


def _check_magic(handle: IO[bytes], path: str, table: str) -> None:
    """Refuse a file that is no Parquet at all; its name says nothing about that."""
    start = handle.read(4)
    handle.seek(0)
    if start not in _MAGIC:
        raise TableError(
            f"{table}: the file is not Parquet, so it cannot be read as Parquet",
            expected="a Parquet file, whatever its name",
            got=quoted(PurePosixPath(path).name),
            where=path,
            do="Take it out of the folder, begin its name with _ or a dot, or name the files that "
            "are meant by a glob, such as FOLDER/*.parquet.",
        )


def first_list_lengths(path: str, column: str, rows: int = 10_000) -> NDArray[np.int64]:
    """Lengths of the non-empty lists among the first rows of a Parquet file."""
    fs, inside = filesystem(path)
    with fs.open(inside, "rb") as handle:
        parquet = pq.ParquetFile(handle, pre_buffer=False)
        batches = _batches(parquet, rows, [column])
        first = next(batches, None)
        if first is None:
            return np.empty(0, dtype=np.int64)
        lengths = pc.list_value_length(first.column(0)).drop_null().to_numpy()
    found: NDArray[np.int64] = lengths[lengths > 0].astype(np.int64)
    return found


@contextmanager
def _rows_of_input(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as err:
        if not is_damage(err):
            raise
        raise unreadable("", path, err) from err


def encrypted(table: str, path: str, error: BaseException | str) -> TableError:
    """The error of an input file that needs a key."""
    return TableError(
        f"{table}: the file is encrypted" if table else "an input file is encrypted",
        expected="a Parquet file that can be read without a key",
        got=f"column {error!r}" if isinstance(error, str) else first_line(error),
        where=path,
        do="Write it unencrypted for this run; no key is ever asked for.",
    )


def unreadable(table: str, path: str, error: BaseException) -> TableError:
    """The error of an input file whose rows cannot be decoded."""
    if says_encrypted(error):
        return encrypted(table, path, error)
    return TableError(
        f"{table}: rows cannot be read" if table else "rows of an input file cannot be read",
        expected="a whole Parquet file",
        got=first_line(error),
        where=path,
        do="The file is damaged: write it again.",
    )


@retried
def column_range(path: str, column: str) -> tuple[Any, Any] | None:
    """Smallest and largest value of a column by the file's statistics; None where they are silent.

    Bounds hold even where a writer cut long texts short.
    """
    fs, inside = filesystem(path)
    with fs.open(inside, "rb") as handle:
        parquet = pq.ParquetFile(handle, pre_buffer=False)
        footer, (at,) = parquet.metadata, leaves(parquet.schema_arrow, [column])
    groups = (footer.row_group(i).column(at) for i in range(footer.num_row_groups))
    ranges = []
    for group in groups:
        found = group.statistics
        if found is None or not found.has_min_max:
            return None
        ranges.append((found.min, found.max))
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


@retried
def read_head(path: str, rows: int, columns: Sequence[str]) -> pa.Table:
    """Some columns of the first rows of a Parquet file, at most as many."""
    fs, inside = filesystem(path)
    with _rows_of_input(path), fs.open(inside, "rb") as handle:
        parquet = pq.ParquetFile(handle, pre_buffer=False)
        # Without threads: one that still reads ahead when the process ends takes it down.
        batch = next(_batches(parquet, rows, columns), None)
        schema = parquet.schema_arrow
    if batch is None:
        return pa.schema([schema.field(name) for name in columns]).empty_table()
    return pa.Table.from_batches([batch])


def _batches(
    parquet: pq.ParquetFile, rows: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Columns of an open file, by their place."""
    groups = list(range(parquet.metadata.num_row_groups))
    places = leaves(parquet.schema_arrow, columns)
    batches: Iterator[pa.RecordBatch] = parquet.reader.iter_batches(
        rows, groups, places, use_threads=False
    )
    return batches

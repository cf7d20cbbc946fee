"""A table as parts, each the rows of one file: as the file holds them, or with columns that stand
elsewhere, without rows that were deleted, in the table's types.

A part that is not what its file holds is read once, batch after batch, into a copy; see
`pipelines.sources.copies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.sources.parquet_leaves import leaves, says_encrypted
from pipelines.storage.files import filesystem, first_line, is_damage, retried
from schemas.errors import TableError

_BATCH_ROWS = 16_384


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a table.

    Attributes:
        path: of the file.
        plain: the file holds the part's rows, neither more nor others, in the wanted columns.
        schema: of the wanted columns.
        rows: reads them, batch after batch.
        identity: changes when the file does; empty where files never change.
    """

    path: str
    plain: bool
    schema: pa.Schema
    rows: Callable[[], Iterator[pa.RecordBatch]]
    identity: str = ""


@dataclass(frozen=True, slots=True)
class TableParts:
    """All parts of a table as one snapshot of it has them.

    Attributes:
        parts: in the order of their paths.
        schema: of the wanted columns, for a table without parts.
        snapshot: which version of a table with a log, in words; None for files.
        identity: of the table and its snapshot, for the name of a copy.
    """

    parts: tuple[Part, ...]
    schema: pa.Schema
    snapshot: str | None = None
    identity: str = field(default="")

    @property
    def plain(self) -> bool:
        """Whether its files can be read as they are. A table without files cannot."""
        return bool(self.parts) and all(part.plain for part in self.parts)


@retried
def file_identity(path: str) -> str:
    """Changes when a file is written again."""
    fs, inside = filesystem(path)
    fs.invalidate_cache()
    info = fs.info(inside)
    changed = info.get("ETag") or info.get("etag") or info.get("mtime") or info.get("created")
    return f"{info['size']}-{changed}"


@retried
def file_schema(path: str, table: str) -> pa.Schema:
    """The Arrow schema of a Parquet file.

    Raises:
        TableError: it cannot be read.
    """
    fs, inside = filesystem(path)
    try:
        with fs.open(inside, "rb") as handle:
            return pq.ParquetFile(handle, pre_buffer=False).schema_arrow
    except (OSError, pa.ArrowException) as err:
        if not isinstance(err, FileNotFoundError) and not is_damage(err):
            raise
        raise TableError(
            f"{table}: a file of the table cannot be read as Parquet",
            got=first_line(err),
            where=path,
        ) from err


def file_rows(
    path: str,
    table: str,
    schema: pa.Schema,
    *,
    values: Mapping[str, pa.Scalar] | None = None,
    names: Mapping[str, str] | None = None,
    keep: pa.BooleanArray | None = None,
) -> Iterator[pa.RecordBatch]:
    """A file's rows with a table's columns.

    Args:
        path: of the file.
        table: which table it is, for errors.
        schema: the columns wanted.
        values: columns that do not stand in the file.
        names: what a column is called in the file, where that is another name.
        keep: which rows count; rows beyond its end do.

    Raises:
        TableError: the file is damaged, or a column has another type than the table's.
    """
    values, names = values or {}, names or {}
    there = file_schema(path, table).names
    held = {f.name: names.get(f.name, f.name) for f in schema if f.name not in values}
    held = {name: inside for name, inside in held.items() if inside in there}
    if twice := [name for name in held.values() if there.count(name) > 1]:
        raise TableError(
            f"{table}: column {twice[0]!r} stands twice in a file", where=path, field=twice[0]
        )
    fs, inside = filesystem(path)
    first = 0
    try:
        with fs.open(inside, "rb") as handle:
            parquet = pq.ParquetFile(handle, pre_buffer=False)
            at = leaves(parquet.schema_arrow, list(held.values()))
            groups = list(range(parquet.num_row_groups))
            for batch in parquet.reader.iter_batches(_BATCH_ROWS, groups, at, use_threads=False):
                columns = [_column(batch, one, held, values) for one in schema]
                made = pa.RecordBatch.from_arrays(columns, schema=schema)
                if keep is not None:
                    mask = keep.slice(first, len(batch))
                    beyond = pa.array([True] * (len(batch) - len(mask)), pa.bool_())
                    made = made.filter(pa.concat_arrays([mask, beyond]))
                first += len(batch)
                yield made
    except (OSError, pa.ArrowException) as err:
        if not is_damage(err):
            raise
        why = "a column is encrypted" if says_encrypted(err) else first_line(err)
        raise TableError(
            f"{table}: a file does not hold what its table says",
            expected=", ".join(f"{f.name} {f.type}" for f in schema),
            got=why,
            where=path,
        ) from err


def _column(
    batch: pa.RecordBatch,
    wanted: pa.Field,
    held: Mapping[str, str],
    values: Mapping[str, pa.Scalar],
) -> pa.Array:
    if wanted.name in held:
        found = batch.column(held[wanted.name])
        return found if found.type == wanted.type else found.cast(wanted.type)
    if wanted.name in values:
        return pa.repeat(values[wanted.name].cast(wanted.type), len(batch))
    return pa.nulls(len(batch), wanted.type)

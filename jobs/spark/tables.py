"""Tables of Spark's catalog, read as inputs.

An input table is copied once into the work folder, as Parquet, under a name that holds a digest of
its content: so every launcher and every step reads the same files, a table that changes during a
run changes nothing, and the same content is the same run, whatever format the table has.

    <work_dir>/tables/<table>-<digest>/_done
    <work_dir>/tables/<table>-<digest>/<copy>/<table>-<digest>/part-00003-17.parquet

Each run that finds no copy writes one of its own. The first that is whole creates `_done`, which
names its files, and every run reads those. The inner folder is named as the outer one, since that
name is by which files of a run's inputs are known to be of a copy.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext

from jobs.spark.carried import carried
from jobs.spark.content import NUM_HASHES, Content, schema_in_utc, with_hashes
from jobs.spark.session import spark_errors
from pipelines.planning.input_tables import check_shape, contract_of
from pipelines.sources.wanted import columns_of
from pipelines.storage import files
from pipelines.storage.records import read_record
from schemas.errors import NightshelfError, RunError, StorageError, TableError, quoted
from schemas.records import Stored
from schemas.settings import RunConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Batches = Iterator[pa.RecordBatch]

_DONE = "_done"


class TableCopy(Stored):
    """What `_done` says: the files of the copy that counts."""

    NAME: ClassVar[str] = "the copy of a table"

    folder: str  # below that of `_done`
    parts: tuple[str, ...]
    rows: int


def copy_tables(spark: SparkSession, config: RunConfig) -> RunConfig:
    """The configuration with each table as the folder of its copy.

    Raises:
        TableError: Spark knows no such table, or cannot read it.
        RunError: the table was changed while it was copied.
        StorageError: the copy could not be written.
    """
    used = _used(config)
    folders = {
        name: _copy(spark, config, name, table) if name in used else None
        for name, table in config.inputs.tables.items()
    }
    inputs = config.inputs.model_copy(update=folders)
    return config.model_copy(update={"inputs": inputs})


def table_problems(spark: SparkSession, config: RunConfig) -> Iterator[NightshelfError]:
    """Tables that `copy_tables` would refuse; nothing is copied."""
    for name, table in _used(config).items():
        try:
            frame = _open(spark, config, name, table)
            schema = schema_in_utc(frame.limit(0).toArrow().schema)
            if name == "candidates":
                check_shape(config, schema, table)
            else:
                contract_of(config, name, by_segment=False).check(schema, table)
        except NightshelfError as err:
            yield err


def _used(config: RunConfig) -> dict[str, str]:
    """The tables of Spark's catalog that the run reads."""
    unused = {"candidates"} if not config.task.uses_candidates else set()
    unused |= set() if config.task.gives_lists else {"exclusions"}
    unused |= set() if config.needs_items else {"catalog"}
    return {name: table for name, table in config.inputs.tables.items() if name not in unused}


def _open(spark: SparkSession, config: RunConfig, name: str, table: str) -> DataFrame:
    """The columns of a table that the run reads."""
    with spark_errors(TableError, f"inputs.{name}: Spark cannot read table {quoted(table)}"):
        return _read_columns(
            spark.table(table), columns_of(config, name), f"inputs.{name}: {table}"
        )


def _copy(spark: SparkSession, config: RunConfig, name: str, table: str) -> str:
    """The folder of a table's copy, made if it is not there."""
    with spark_errors(TableError, f"inputs.{name}: Spark cannot read table {quoted(table)}"):
        frame = _open(spark, config, name, table)
        content = Content.of_frame(frame)
        digest = content.digest(frame.schema.json())
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", table)[:80]
    folder = files.join(config.run.work_dir, "tables", f"{safe}-{digest}")
    done = _copy_of(folder)
    if done is not None:
        return files.join(folder, done.folder)
    own = uuid.uuid4().hex
    mine = f"{own}/{safe}-{digest}"
    with spark_errors(StorageError, f"inputs.{name}: table {quoted(table)} could not be copied"):
        spark.sparkContext.setJobDescription(f"nightshelf copy {table}")
        written = (
            with_hashes(frame)
            .mapInArrow(
                carried(_write_part(files.join(folder, mine))),
                "part string, rows long, mixed string, total string",
            )
            .collect()
        )
        spark.sparkContext.setJobDescription("")
    parts = [row.part for row in written]
    if not parts:  # no partition has a row: the copy still says which columns there are
        parts = ["part-00000-none.parquet"]
        schema = schema_in_utc(frame.limit(0).toArrow().schema)
        with _part(files.join(folder, mine), parts[0], schema):
            pass
    copied = Content.of_parts(
        [Content(part.rows, int(part.mixed), int(part.total)) for part in written]
    )
    if copied != content:
        files.remove_folder(files.join(folder, own))
        others = "" if copied.rows != content.rows else ", with other content"
        raise RunError(
            f"inputs.{name}: table {quoted(table)} was changed while it was copied",
            expected=f"{content.rows} rows",
            got=f"{copied.rows} rows{others}",
            do="Run the same command again when nobody writes to the table.",
        )
    copy = TableCopy(folder=mine, parts=tuple(sorted(parts)), rows=copied.rows)
    return files.join(folder, _publish(folder, copy).folder)


def _read_columns(frame: DataFrame, wanted: set[str], name: str) -> DataFrame:
    """The columns that a run reads; with them those whose names differ in case alone, so that the
    check of the table can name them.

    Raises:
        TableError: the table lacks the column that names its rows.
    """
    missing = {column.casefold() for column in wanted - set(frame.columns)}
    found = [c for c in frame.columns if c in wanted or c.casefold() in missing]
    if not wanted.intersection(found):
        raise TableError(
            f"{name} has no column of this table",
            expected=", ".join(sorted(wanted)),
            got=", ".join(frame.columns),
        )
    return frame.select([f"`{column.replace('`', '``')}`" for column in found])


def _publish(folder: str, mine: TableCopy) -> TableCopy:
    """The copy that counts: this one, or that of a run that was first."""
    data = (mine.model_dump_json(indent=1) + "\n").encode()
    files.create(files.join(folder, _DONE), data)
    done = _copy_of(folder)
    if done is None:
        raise StorageError(
            "the copy of a table was removed", where=folder, do="Run the same command again."
        )
    if done.folder != mine.folder:
        files.remove_folder(files.join(folder, mine.folder.partition("/")[0]))
    return done


def _copy_of(folder: str) -> TableCopy | None:
    """The finished copy in a folder, without files that it does not name; None where there is none.

    Raises:
        RecordError: another release wrote it.
        StorageError: it is damaged, or lacks files.
    """
    path = files.join(folder, _DONE)
    try:
        done = read_record(TableCopy, path)
    except FileNotFoundError:
        return None
    inside = files.join(folder, done.folder)
    there = {name for name in files.list_names(inside) if not name.startswith(".")}
    if lost := sorted(set(done.parts) - there):
        raise StorageError(
            "the copy of a table lacks files",
            expected=f"{len(done.parts)} files",
            got=f"no {lost[0]}",
            where=inside,
            do=f"Remove {folder}, then run the same command again.",
        )
    for stray in there - set(done.parts):  # of an attempt at a part that was lost
        files.remove_if_there(files.join(inside, stray))
    return done


def _write_part(folder: str) -> Callable[[Batches], Batches]:
    """Writes the batches of a partition as one Parquet file, batch after batch, without the last
    columns, which hold the rows' hashes and are summed up.
    """

    def write(batches: Batches) -> Batches:
        context = TaskContext.get()
        assert context is not None, "only called in a task"
        first = next(batches, None)
        if first is None:
            return
        schema = schema_in_utc(pa.schema(list(first.schema)[:-NUM_HASHES]))
        found = []
        # A lost attempt at the same part never replaces a file that counts.
        name = f"part-{context.partitionId():05d}-{context.taskAttemptId()}.parquet"
        with _part(folder, name, schema) as out:
            while first is not None:
                *columns, one, other = first.columns
                told = [col.cast(kind) for col, kind in zip(columns, schema.types, strict=True)]
                out.write_batch(pa.RecordBatch.from_arrays(told, schema=schema))
                found.append(Content.of_hashes([one, other]))
                first = next(batches, None)
        whole = Content.of_parts(found)
        yield pa.RecordBatch.from_pydict(
            {
                "part": [name],
                "rows": [whole.rows],
                "mixed": [str(whole.mixed)],
                "total": [str(whole.total)],
            }
        )

    return write


@contextmanager
def _part(folder: str, name: str, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A file of the copy, which is there once the block ends well."""
    with files.atomic_target(files.join(folder, name)) as target:
        fs, inside = files.filesystem(target)
        with fs.open(inside, "wb") as handle, pq.ParquetWriter(handle, schema) as out:
            yield out

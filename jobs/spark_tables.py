"""Tables of Spark's catalog: read as inputs, and told of what was published.

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

import functools
import json
import operator
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError
from pyspark import TaskContext
from pyspark.sql import functions as F

from jobs.spark_session import spark_errors
from pipelines import files
from pipelines.publish.parquet import ParquetTable
from schemas.eligibility import attributes, user_columns
from schemas.errors import RunError, StorageError, TableError, quoted
from schemas.runs import RunPlan
from schemas.settings import RunConfig
from schemas.tables import USER_CANDIDATES, USER_EXCLUSIONS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

Batches = Iterator[pa.RecordBatch]

_DONE = "_done"
_LAYOUT = 3  # of the folder of a copy; copies of another one are not used
_ROW_HASH = "nightshelf row hash"  # no column of an input has spaces in its name
_WRAP = 1 << 64


class _Copy(BaseModel):
    """What `_done` says: the files of the copy that counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    unused = {"candidates"} if not config.task.uses_candidates else set()
    unused |= {"exclusions"} if config.task.embed is not None else set()
    unused |= set() if config.needs_items else {"catalog"}
    tables = config.inputs.tables
    folders = {
        name: None if name in unused else _copy(spark, config, name, table)
        for name, table in tables.items()
    }
    inputs = config.inputs.model_copy(update=folders)
    return config.model_copy(update={"inputs": inputs})


def columns_of(config: RunConfig, name: str) -> set[str]:
    """Columns of an input that a run may read; others need not be copied."""
    rule = config.task.eligible
    if name == "users":
        columns = {"user_id", "embedding", "history", "user_sid", "segment"}
        columns |= {USER_CANDIDATES, USER_EXCLUSIONS} if config.inputs.self_contained else set()
        columns |= set(config.prompt.parsed.columns) | set(user_columns(rule) if rule else ())
        columns |= {config.task.k_column} if config.task.k_column else set()
        labels = config.task.label.labels_column if config.task.label else None
        return columns | ({labels} if labels else set())
    if name == "catalog":
        columns = {"item_id", "sid", "popularity", "title", "text"}
        columns |= {config.text.column} if config.text else set()
        return columns | set(attributes(rule) if rule else ())
    return {"user_id", "item_id", "item_ids", "segment"}


def _copy(spark: SparkSession, config: RunConfig, name: str, table: str) -> str:
    """The folder of a table's copy, made if it is not there."""
    with spark_errors(TableError, f"inputs.{name}: Spark cannot read table {quoted(table)}"):
        frame = spark.table(table)
        wanted = columns_of(config, name)
        frame = frame.select([f"`{column}`" for column in frame.columns if column in wanted])
        content = _content(frame)
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
            frame.withColumn(_ROW_HASH, _row_hash(frame))
            .mapInArrow(
                _write_part(files.join(folder, mine)),
                "part string, rows long, mixed long, total string",
            )
            .collect()
        )
        spark.sparkContext.setJobDescription("")
    copied = _Content.of_parts(written)
    if copied != content:
        files.remove_folder(files.join(folder, own))
        others = "" if copied.rows != content.rows else ", with other content"
        raise RunError(
            f"inputs.{name}: table {quoted(table)} was changed while it was copied",
            expected=f"{content.rows} rows",
            got=f"{copied.rows} rows{others}",
            do="Run the same command again when nobody writes to the table.",
        )
    copy = _Copy(folder=mine, parts=tuple(sorted(row.part for row in written)), rows=copied.rows)
    return files.join(folder, _publish(folder, copy).folder)


def _publish(folder: str, mine: _Copy) -> _Copy:
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


def _copy_of(folder: str) -> _Copy | None:
    """The finished copy in a folder, without files that it does not name; None where there is none.

    Raises:
        StorageError: it lacks files.
    """
    path = files.join(folder, _DONE)
    try:
        done = _Copy.model_validate(files.read_json(path))
    except FileNotFoundError:
        return None
    except ValidationError as err:
        raise StorageError("a file of the run is damaged", got=str(err), where=path) from err
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


@dataclass(frozen=True, slots=True)
class _Content:
    """What rows there are, whatever their order.

    Rows are hashed one by one and the hashes combined by exclusive or and by sum: the second tells
    repeated rows apart, which the first forgets.
    """

    rows: int
    mixed: int
    total: int  # modulo 2^64

    @classmethod
    def of_parts(cls, parts: Sequence[Any]) -> _Content:
        """Of parts of a table together."""
        return cls(
            sum(part.rows for part in parts),
            functools.reduce(operator.xor, (part.mixed for part in parts), 0),
            sum(int(part.total) for part in parts) % _WRAP,
        )

    def digest(self, schema: str) -> str:
        """A hash of these rows in these columns."""
        told = [_LAYOUT, schema, self.rows, self.mixed, self.total]
        return files.hash_bytes(json.dumps(told).encode())[:16]


def _row_hash(frame: DataFrame) -> Column:
    return F.xxhash64(*(F.col(f"`{name}`") for name in frame.columns))


def _content(frame: DataFrame) -> _Content:
    row = _row_hash(frame)
    found = frame.agg(
        F.count(F.lit(1)).alias("rows"),
        F.bit_xor(row).alias("mixed"),
        F.sum(row.cast("decimal(38,0)")).alias("total"),
    ).first()
    assert found is not None, "an aggregate has one row"
    return _Content(found.rows, found.mixed or 0, int(found.total or 0) % _WRAP)


def _write_part(folder: str) -> Callable[[Batches], Batches]:
    """Writes the batches of a partition as one Parquet file, batch after batch, without the last
    column, which holds the rows' hashes and is summed up.
    """

    def write(batches: Batches) -> Batches:
        context = TaskContext.get()
        assert context is not None, "only called in a task"
        first = next(batches, None)
        if first is None:
            return
        schema = pa.schema(list(first.schema)[:-1])
        rows, mixed, total = 0, 0, 0
        # A lost attempt at the same part never replaces a file that counts.
        name = f"part-{context.partitionId():05d}-{context.taskAttemptId()}.parquet"
        with files.atomic_target(files.join(folder, name)) as target:
            fs, inside = files.filesystem(target)
            with fs.open(inside, "wb") as handle, pq.ParquetWriter(handle, schema) as out:
                while first is not None:
                    *columns, hashes = first.columns
                    out.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
                    numbers = hashes.to_numpy()
                    rows += len(numbers)
                    mixed ^= int(np.bitwise_xor.reduce(numbers))
                    total += int(numbers.sum())  # modulo 2^64, as sums of arrays are
                    first = next(batches, None)
        told = {"part": [name], "rows": [rows], "mixed": [mixed], "total": [str(total)]}
        yield pa.RecordBatch.from_pydict(told)

    return write


def register(spark: SparkSession, plan: RunPlan, name: str) -> None:
    """Add a published partition to a table of Spark's catalog, which is made if it is not there.

    Raises:
        TableError: the table is there and is another one, or the catalog refuses.
    """
    output = plan.config.output
    folder = ParquetTable(output.path, plan.ds, plan.surface).partition
    table = ".".join(f"`{part.replace('`', '``')}`" for part in name.split("."))
    partition = f"ds = {_text(plan.ds)}, surface = {_text(plan.surface)}"
    with spark_errors(TableError, f"spark.register_table: {quoted(name)} cannot be used"):
        columns = [
            f"`{field.name}` {field.dataType.simpleString()}"
            for field in spark.read.parquet(_location(folder)).schema.fields
        ]
        spark.sql(
            f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(columns)}, ds STRING, surface STRING) "
            f"USING PARQUET PARTITIONED BY (ds, surface) LOCATION {_text(_location(output.path))}"
        )
        spark.sql(f"ALTER TABLE {table} DROP IF EXISTS PARTITION ({partition})")
        spark.sql(
            f"ALTER TABLE {table} ADD PARTITION ({partition}) LOCATION {_text(_location(folder))}"
        )
        spark.catalog.refreshTable(name)


def _location(path: str) -> str:
    """A path as Spark must hear it: one of this disk is not one of its default file system."""
    local = files.local_path(path)
    return path if local is None else f"file://{local}"


def _text(value: str) -> str:
    """A string literal of Spark SQL."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"

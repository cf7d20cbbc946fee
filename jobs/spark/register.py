"""A table of Spark's catalog that is told of what is published.

The files are the run's. The catalog only hears where they are: partitions are added, or pointed at
their folder, and never dropped, since dropping one of a table that Spark manages removes its files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from jobs.spark.session import spark_errors
from pipelines.publish.parquet import ParquetTable
from pipelines.storage import files
from schemas.errors import StorageError, TableError, quoted
from schemas.runs import RunPlan
from schemas.settings import RunConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PARTITIONED_BY = ("ds", "surface")


def check_registration(spark: SparkSession, config: RunConfig, name: str) -> None:
    """Find out before anything is scored whether the table can be told.

    Raises:
        TableError: it is another table than one over the files of `output.path`, or its database is
            not there.
    """
    with spark_errors(TableError, f"spark.register_table: {quoted(name)} cannot be used"):
        if spark.catalog.tableExists(_quoted_name(name)):
            _check_table(spark, config, name)
            return
        database = name.rpartition(".")[0]
        if database and not spark.catalog.databaseExists(_quoted_name(database)):
            raise TableError(
                f"spark.register_table: there is no database {quoted(database)} in Spark's catalog",
                do=f"Create it: CREATE DATABASE {database}.",
                field="spark.register_table",
            )


def register(spark: SparkSession, plan: RunPlan, name: str) -> None:
    """Add a published partition to a table of Spark's catalog, which is made if it is not there.

    Raises:
        TableError: the table is there and is another one.
        StorageError: the catalog did not do it.
    """
    output = plan.config.output
    folder = _location(ParquetTable(output.path, plan.ds, plan.surface).partition)
    table = _quoted_name(name)
    partition = f"ds = {_text(plan.ds)}, surface = {_text(plan.surface)}"
    with spark_errors(StorageError, f"spark.register_table: {quoted(name)} was not told"):
        columns = {
            field.name: field.dataType.simpleString()
            for field in spark.read.parquet(folder).schema.fields
        }
        typed = ", ".join(f"`{column}` {kind}" for column, kind in columns.items())
        spark.sql(
            f"CREATE TABLE IF NOT EXISTS {table} ({typed}, ds STRING, surface STRING) "
            f"USING PARQUET PARTITIONED BY (ds, surface) LOCATION {_text(_location(output.path))}"
        )
        _check_table(spark, plan.config, name)
        _check_columns(spark, name, columns)
        spark.sql(
            f"ALTER TABLE {table} ADD IF NOT EXISTS PARTITION ({partition}) "
            f"LOCATION {_text(folder)}"
        )
        spark.sql(f"ALTER TABLE {table} PARTITION ({partition}) SET LOCATION {_text(folder)}")
        spark.catalog.refreshTable(table)


def _check_table(spark: SparkSession, config: RunConfig, name: str) -> None:
    """A table by whose partitions only our own folder is ever named.

    Raises:
        TableError: it holds its own files, or those of another folder, or has other partitions.
    """
    table = _quoted_name(name)
    kind = spark.catalog.getTable(table).tableType
    partitions = tuple(
        column.name for column in spark.catalog.listColumns(table) if column.isPartition
    )
    facts = _facts(spark, table)
    wanted = f"an external Parquet table at {config.output.path}, partitioned by ds and surface"
    place = facts.get("Location", "")
    stored = facts.get("Provider", "").lower(), facts.get("Serde Library", "").lower()
    if kind != "EXTERNAL":
        got = f"a table of type {kind}" + (", whose files are Spark's own" * (kind == "MANAGED"))
    elif _place(place) != _place(_location(config.output.path)):
        got = f"a table at {place or 'no place'}"
    elif partitions != _PARTITIONED_BY:
        got = f"partitions by {', '.join(partitions) or 'nothing'}"
    elif stored[0] != "parquet" and not (stored[0] == "hive" and "parquet" in stored[1]):
        got = f"format {stored[0] or 'unknown'}"
    else:
        return
    raise TableError(
        f"spark.register_table: {quoted(name)} is another table",
        expected=wanted,
        got=got,
        do="Name a table that is not there yet: it is made as it must be. Nothing was changed.",
        field="spark.register_table",
    )


def _check_columns(spark: SparkSession, name: str, wanted: dict[str, str]) -> None:
    there = {
        column.name: column.dataType for column in spark.catalog.listColumns(_quoted_name(name))
    }
    for column, kind in wanted.items():
        if there.get(column) == kind:
            continue
        raise TableError(
            f"spark.register_table: {quoted(name)} lacks a column of what is published",
            expected=f"`{column}` {kind}",
            got=there.get(column) or "no such column",
            do="ALTER TABLE … ADD COLUMNS, or name a table that is not there yet.",
            field="spark.register_table",
        )


def _facts(spark: SparkSession, table: str) -> dict[str, str]:
    """What `DESCRIBE` says of the table itself, below its columns."""
    rows = spark.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
    starts = [at for at, row in enumerate(rows) if row.col_name == "# Detailed Table Information"]
    return {row.col_name: row.data_type or "" for row in rows[starts[0] :]} if starts else {}


def _place(location: str) -> tuple[str, str, str]:
    """A location by which two spellings of one place are the same."""
    url = urlsplit(location)
    scheme = {"s3a": "s3", "s3n": "s3", "": "file"}.get(url.scheme, url.scheme)
    return scheme, url.netloc, unquote(url.path).rstrip("/")


def _location(path: str) -> str:
    """A path as Spark must hear it: one of this disk is not one of its default file system."""
    local = files.local_path(path)
    return path if local is None else f"file://{local}"


def _quoted_name(name: str) -> str:
    return ".".join(f"`{part.replace('`', '``')}`" for part in name.split("."))


def _text(value: str) -> str:
    """A string literal of Spark SQL."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"

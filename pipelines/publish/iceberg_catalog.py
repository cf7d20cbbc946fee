"""The catalog of an Iceberg table, and the table in it: found, created, widened."""

from __future__ import annotations

import glob
import logging
import os
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NoSuchTableError,
    ServerError,
    ServiceUnavailableError,
    TableAlreadyExistsError,
    TooManyRequestsError,
)
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from sqlalchemy import URL
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from tenacity import (
    RetryCallState,
    retry,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from pipelines.publish.columns import missing_columns
from pipelines.publish.places import check_new_table, wait_for
from pipelines.storage import files
from schemas.errors import ConfigError, quoted
from schemas.settings import OutputSettings

# A commit about another partition came between, or the catalog is busy: asking again may do.
BUSY = (
    CommitFailedException,
    CommitStateUnknownException,
    IntegrityError,  # two made the namespace
    OperationalError,
    ServerError,
    ServiceUnavailableError,
    TooManyRequestsError,
)
_LOG = logging.getLogger("nightshelf")
_SAID_FROM = 3  # tries in vain, after which it is said
_WAIT_S = 30.0  # in all, for a catalog that is busy
_LOCK_S = 3  # for SQLite's lock, each time


def _say(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    if state.attempt_number >= _SAID_FROM or isinstance(error, OperationalError):
        _LOG.warning("the table's catalog is busy, trying again: %s", first_line(error))


retried = retry(
    retry=retry_if_exception_type(BUSY),
    wait=wait_random_exponential(multiplier=0.05, max=5.0),
    stop=stop_after_attempt(20) | stop_after_delay(_WAIT_S),
    before_sleep=_say,
    reraise=True,
)
PROPERTIES = {
    # Whole values, so that a delete by partition never has to open a file.
    "write.metadata.metrics.column.ds": "full",
    "write.metadata.metrics.column.surface": "full",
    "write.metadata.metrics.column.run_id": "full",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "10",
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "20",
    "write.parquet.compression-codec": "zstd",
}

_PROPERTIES_ASKED = {  # and the only values of theirs that a publish obeys
    "write.format.default": "parquet",
    "write.wap.enabled": "false",
    "write.delete.isolation-level": "serializable",
}


def local_root(output: OutputSettings) -> str:
    """The output folder, which holds the default catalog.

    Raises:
        ConfigError: it is not on a disk of this machine.
    """
    local = files.local_path(output.path)
    if local is None:
        raise ConfigError(
            "output.catalog is missing",
            expected="a catalog for a table that is not on a local disk",
            got=quoted(output.path),
            do="The default catalog, SQLite, needs a local output.path.",
        )
    return local


def check_local_root(output: OutputSettings) -> None:
    """Raise `ConfigError` for an output folder that pyiceberg would not write to: it takes a file's
    path for a URL, and leaves out what would be its query or fragment.
    """
    if output.catalog or not (found := [sign for sign in "?#" if sign in local_root(output)]):
        return
    raise ConfigError(
        f"output.path has a {found[0]}, where pyiceberg ends the path",
        expected="a path without ? and #",
        got=quoted(output.path),
        field="output.path",
        do="Name another folder.",
    )


@retried
def open_catalog(output: OutputSettings) -> Catalog:
    """The configured catalog, or SQLite in the output folder.

    Raises:
        ConfigError: the table is remote and no catalog is given.
    """
    given = {key: _text(value) for key, value in output.catalog.items()}
    name = given.pop("name", "nightshelf")
    if output.catalog:
        if given.get("type") in ("sql", "glue", "hive", "dynamodb"):
            local = files.local_path(output.path)
            given.setdefault("warehouse", output.path if local is None else f"file://{local}")
        return load_catalog(name, **given)
    root = local_root(output)
    os.makedirs(root, exist_ok=True)
    database = URL.create("sqlite", database=f"{root}/catalog.db", query={"timeout": f"{_LOCK_S}"})
    uri = database.render_as_string()
    return load_catalog(name, type="sql", uri=uri, warehouse=f"file://{root}")


def first_line(error: BaseException | None) -> str:
    """What an error says, in a line: of SQLAlchemy's without the statement and its parameters."""
    if isinstance(error, SQLAlchemyError) and error.args:
        return quoted(str(error.args[0]))
    return quoted(str(error).strip().partition("\n")[0])


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_table(catalog: Catalog, name: str) -> Table | None:
    """The table; None when there is none."""
    try:
        return catalog.load_table(name)
    except NoSuchTableError:
        return None


@retried
def table_for(catalog: Catalog, output: OutputSettings, schema: pa.Schema) -> Table:
    """The table, created or widened for these columns.

    Raises:
        ConfigError: it is a table that cannot be published to, or one that is lost.
    """
    name = output.table_name
    table = load_table(catalog, name)
    if table is None:
        table = wait_for(lambda: load_table(catalog, name), lambda: check_not_lost(output))
    if table is None:
        catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
        with suppress(TableAlreadyExistsError):  # somebody was faster
            tx = catalog.create_table_transaction(name, schema, properties=PROPERTIES)
            with tx.update_spec() as spec:
                spec.add_identity("ds").add_identity("surface")
            with tx.update_sort_order() as order:
                if "user_id" in schema.names:
                    order.asc("user_id", IdentityTransform())
            tx.commit_transaction()
        table = catalog.load_table(name)
    check_table(table, schema)
    if missing := missing_columns(table.schema().as_arrow(), schema, name):
        with table.update_schema() as update:
            update.union_by_name(pa.schema(missing))
    return table


def check_not_lost(output: OutputSettings) -> None:
    """Raise `ConfigError` where a table that the catalog does not know has left its metadata, or
    the folder is a table of another format: a new one there would hide what was published.
    """
    root = output.path.rstrip("/")
    namespace, _, name = output.table_name.rpartition(".")
    fs, inside = files.filesystem(root)
    fs.invalidate_cache()
    places = (f"{namespace}/{name}", f"{namespace}.db/{name}", name, "")
    found = [
        str(path)
        for place in places
        for path in fs.glob(
            f"{glob.escape(f'{inside}/{place}'.rstrip('/'))}/metadata/*.metadata.json"
        )
    ]
    if not found:
        if not output.catalog:
            check_new_table(root, "iceberg")
        return
    newest = max(found, key=lambda path: path.rpartition("/")[2])
    raise ConfigError(
        "the catalog does not know the table, whose files are there",
        expected=f"table {output.table_name} in the catalog, or no metadata of it",
        got=f"{len(found)} metadata files, the newest {newest.rpartition('/')[2]}",
        where=root,
        do="The catalog was lost or is another one. Restore it, or register the table again: "
        f"catalog.register_table({output.table_name!r}, {newest!r}) with pyiceberg. A new table "
        "would hide every date that was published.",
        field="output.catalog",
    )


def check_table(table: Table, mine: pa.Schema) -> None:
    """Raise `ConfigError` for a table that cannot be published to: see docs/tables.md."""
    check_partitions(table)
    schema, properties = table.schema(), table.properties
    keys = {"ds", "surface", *({"user_id", "rank"} & set(mine.names))}
    identifiers = schema.identifier_field_names()
    problems = {
        f"format version {table.metadata.format_version}": table.metadata.format_version > 2,
        f"identifier fields {', '.join(sorted(identifiers))}": bool(identifiers)
        and not identifiers >= keys,
    }
    for key, good in _PROPERTIES_ASKED.items():
        value = properties.get(key, good)
        problems[f"{key} = {value}"] = value.lower() != good
    problems["encryption"] = any(key.startswith("encryption.") for key in properties)
    for what, there in problems.items():
        if there:
            raise ConfigError(
                "the Iceberg table asks for what a publish does not do",
                got=what,
                where=".".join(table.name()),
                do="Change that of the table, or publish to another one.",
            )


def check_partitions(table: Table) -> None:
    """Raise `ConfigError` unless the table is partitioned by the values of ds and surface."""
    fields = table.spec().fields
    names = sorted(table.schema().find_field(field.source_id).name for field in fields)
    if names != ["ds", "surface"] or not all(
        isinstance(field.transform, IdentityTransform) for field in fields
    ):
        raise ConfigError(
            "the Iceberg table has other partitions",
            expected="partitioned by the values of ds and surface",
            got=quoted(str(table.spec())),
            where=".".join(table.name()),
        )

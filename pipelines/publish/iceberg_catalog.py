"""The catalog of an Iceberg table, and the table in it: found, created, widened."""

from __future__ import annotations

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
from sqlalchemy.exc import IntegrityError, OperationalError
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from pipelines import files
from pipelines.publish.columns import missing_columns
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
retried = retry(
    retry=retry_if_exception_type(BUSY),
    wait=wait_random_exponential(multiplier=0.05, max=5.0),
    stop=stop_after_attempt(10),
    reraise=True,
)
_PROPERTIES = {
    # Whole values, so that a delete by partition never has to open a file.
    "write.metadata.metrics.column.ds": "full",
    "write.metadata.metrics.column.surface": "full",
    "write.metadata.metrics.column.run_id": "full",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.parquet.compression-codec": "zstd",
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
    uri = URL.create("sqlite", database=f"{root}/catalog.db").render_as_string()
    return load_catalog(name, type="sql", uri=uri, warehouse=f"file://{root}")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_table(catalog: Catalog, name: str) -> Table | None:
    """The table; None when there is none."""
    try:
        return catalog.load_table(name)
    except NoSuchTableError:
        return None


@retried
def table_for(catalog: Catalog, name: str, schema: pa.Schema) -> Table:
    """The table, created or widened for these columns.

    Raises:
        ConfigError: it has other partitions, or columns of other types.
    """
    table = load_table(catalog, name)
    if table is None:
        catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
        with suppress(TableAlreadyExistsError):  # somebody was faster
            tx = catalog.create_table_transaction(name, schema, properties=_PROPERTIES)
            with tx.update_spec() as spec:
                spec.add_identity("ds").add_identity("surface")
            with tx.update_sort_order() as order:
                if "user_id" in schema.names:
                    order.asc("user_id", IdentityTransform())
            tx.commit_transaction()
        table = catalog.load_table(name)
    check_partitions(table)
    if missing := missing_columns(table.schema().as_arrow(), schema, name):
        with table.update_schema() as update:
            update.union_by_name(pa.schema(missing))
    return table


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

"""Iceberg tables as inputs: the files of one snapshot, read by pyiceberg where they say too little.

Columns are known by their field ids, deletes lie in files of their own, and partitions may hold
what no file does. A file whose columns have the ids and names of the table, and of which nothing is
deleted, is read as it stands; any other goes through pyiceberg, one file at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipelines.sources.marks import is_snapshot
from pipelines.sources.parts import Part, TableParts, file_schema
from pipelines.storage import files
from pipelines.storage.storage_errors import StoreAwayError, translate
from schemas.errors import (
    AccessError,
    ConfigError,
    NightshelfError,
    TableError,
    is_panic,
    quoted,
)
from schemas.input_tables import IcebergInput

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask, Table

_NUMBER = re.compile(r"v?(\d+)")
# A path in a store is opened with the clients, credentials and endpoint of every other path.
_CLIENTS = {"py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO"}
# What pyiceberg says of a catalog's answer, by class.
_DENIED = ("UnauthorizedError", "ForbiddenError", "OAuthError", "AuthorizationExpiredError")
_BUSY = ("ServerError", "ServiceUnavailableError", "TooManyRequestsError")


def read_iceberg(source: IcebergInput, table: str, wanted: set[str] | None) -> TableParts:
    """The parts of an Iceberg table at one snapshot.

    Args:
        source: which table, and which of its snapshots.
        table: which input it is, for errors.
        wanted: columns that may be read; None: all.

    Raises:
        TableError: there is no such table or snapshot, or pyiceberg cannot read it.
        ConfigError: pyiceberg is not installed, or the store or catalog has no credentials.
        StorageError: the store or the catalog does not answer.
    """
    try:
        from pyiceberg.io.pyarrow import schema_to_pyarrow
    except ImportError as err:
        raise ConfigError(
            f"{table}: the input is an Iceberg table, and pyiceberg is not installed",
            got=files.first_line(err),
            where=source.iceberg,
            do="Install it: pip install 'nightshelf[iceberg]'.",
            field=f"inputs.{table}",
        ) from err
    with _as_ours(source, table):
        found = _open(source, table)
        scan = found.scan(snapshot_id=source.snapshot)
        if source.snapshot is not None and found.snapshot_by_id(source.snapshot) is None:
            known = ", ".join(str(one.snapshot_id) for one in found.snapshots()[-5:])
            raise TableError(
                f"{table}: the Iceberg table has no such snapshot",
                expected=f"one of its snapshots, the latest {known or 'none'}",
                got=str(source.snapshot),
                where=source.iceberg,
                field=f"inputs.{table}",
            )
        schema = scan.projection()
        names = [f.name for f in schema.fields if wanted is None or f.name in wanted]
        chosen = schema.select(*names)
        arrow = schema_to_pyarrow(chosen, include_field_ids=False)
        tasks = sorted(scan.plan_files(), key=lambda task: str(task.file.file_path))
        parts = [_part(found, task, chosen, arrow, table, source) for task in tasks]
        current = scan.snapshot()
    snapshot = "none" if current is None else str(current.snapshot_id)
    return TableParts(
        tuple(parts),
        arrow,
        snapshot=f"Iceberg snapshot {snapshot}",
        identity=f"iceberg {found.metadata.table_uuid} {snapshot} {schema.schema_id}",
    )


def _part(
    found: Table,
    task: FileScanTask,
    chosen: Schema,
    arrow: pa.Schema,
    table: str,
    source: IcebergInput,
) -> Part:
    path = _plain_path(task.file.file_path)
    plain = not task.delete_files and str(task.file.file_format).upper().endswith("PARQUET")
    return Part(
        path,
        plain=plain and _is_as_it_stands(file_schema(path, table), chosen),
        schema=arrow,
        rows=partial(_rows, found, task, chosen, arrow, table, source),
    )


def _is_as_it_stands(held: pa.Schema, chosen: Schema) -> bool:
    """Whether a file has the table's columns under their ids and names."""
    for field in chosen.fields:
        at = held.get_all_field_indices(field.name)
        if len(at) != 1:
            return False
        metadata = held.field(at[0]).metadata or {}
        if metadata.get(b"PARQUET:field_id") != str(field.field_id).encode():
            return False
    return True


def _rows(
    found: Table,
    task: FileScanTask,
    chosen: Schema,
    arrow: pa.Schema,
    table: str,
    source: IcebergInput,
) -> Iterator[pa.RecordBatch]:
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan

    with _as_ours(source, table):
        scan = ArrowScan(found.metadata, found.io, chosen, AlwaysTrue())
        for batch in scan.to_record_batches([task]):
            yield batch.select(arrow.names).cast(arrow)


def _open(source: IcebergInput, table: str) -> Table:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.table import StaticTable

    name = source.iceberg
    if source.catalog:
        given = {key: _text(value) for key, value in source.catalog.items()}
        return load_catalog(given.pop("name", "nightshelf"), **given).load_table(name)
    if source.is_name:
        catalog, _, rest = name.partition(".")
        if "." in rest:
            return load_catalog(catalog).load_table(rest)
        return load_catalog().load_table(name)
    path = name if name.endswith(".json") else _newest(name, table)
    opened: Table = StaticTable.from_metadata(path, _CLIENTS if "://" in path else {})
    if path != name:
        _check_not_moved(opened.metadata.location, name, table)
    return opened


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _newest(root: str, table: str) -> str:
    """The newest metadata file of a table's folder.

    Raises:
        TableError: there is none, or two are the newest.
    """
    folder = files.join(root, "metadata")
    names = files.list_names(folder)
    found: dict[int, list[str]] = {}
    for name in filter(is_snapshot, names):
        match = _NUMBER.match(name)
        assert match is not None, "a snapshot's name begins with a number"
        found.setdefault(int(match[1]), []).append(name)
    if "version-hint.text" in names:
        hint = files.read_bytes(files.join(folder, "version-hint.text")).decode().strip()
        if hint.isdecimal() and found.get(int(hint)):
            found = {int(hint): found[int(hint)]}
    if not found:
        raise TableError(
            f"{table}: the folder is no Iceberg table",
            expected="metadata/*.metadata.json in it",
            where=root,
            field=f"inputs.{table}",
        )
    newest = found[max(found)]
    if len(newest) > 1:
        raise TableError(
            f"{table}: two metadata files of the Iceberg table are the newest",
            got=" and ".join(newest),
            where=folder,
            do="Name the one that counts, or the table in its catalog: {iceberg: …}.",
        )
    return files.join(folder, newest[0])


def _check_not_moved(location: str, root: str, table: str) -> None:
    """Refuse a folder that was copied: its metadata names files elsewhere."""
    said, there = (_bare(one) for one in (location, root))
    if said != there:
        raise TableError(
            f"{table}: the Iceberg table was copied or moved; its metadata names other files",
            expected=f"the table where it says that it is, {location}",
            got=root,
            where=root,
            do="Name the table where it is, or write what it holds as Parquet.",
        )


def _bare(path: str) -> str:
    """A place to compare: s3:// and s3a:// name the same, and so do links."""
    path = _plain_path(path).rstrip("/")
    return path.partition("://")[2] if "://" in path else os.path.realpath(path)


def _plain_path(path: str) -> str:
    """A path as the rest of the program writes it: one of this machine without its protocol."""
    return (files.local_path(path) or path) if path.startswith("file:") else path


@contextmanager
def _as_ours(source: IcebergInput, table: str) -> Iterator[None]:
    try:
        yield
    except NightshelfError:
        raise
    except BaseException as err:
        if not isinstance(err, Exception) and not is_panic(err):
            raise
        if (found := _of_place(err, source.iceberg)) is not None:
            found.what, found.field = f"{table}: {found.what}", f"inputs.{table}"
            raise found from err
        raise TableError(
            f"{table}: the Iceberg table cannot be read",
            expected="a table that pyiceberg reads",
            got=quoted(files.first_line(err)),
            where=source.iceberg,
            field=f"inputs.{table}",
            do="Name it by its folder, a metadata file, or its name in a catalog; what pyiceberg "
            "cannot read, write as Parquet.",
        ) from err


def _of_place(error: BaseException, where: str) -> NightshelfError | None:
    """The error of a store or a catalog that may not be used or does not answer; None where it is
    the table's.
    """
    kind = type(error).__name__
    if kind in _DENIED:
        return AccessError(
            "the table's catalog may not be used",
            got=f"{kind}: {files.first_line(error)}",
            where=where,
            do="Give pyiceberg the credentials it needs: .pyiceberg.yaml, or "
            "PYICEBERG_CATALOG__NAME__KEY in the environment.",
        )
    if kind in _BUSY:
        return StoreAwayError(
            "the table's catalog does not answer",
            got=f"{kind}: {files.first_line(error)}",
            where=where,
            do="Run the same command again once it does.",
        )
    found = translate(error, where, what="a table")
    return found if isinstance(found, AccessError | StoreAwayError) else None

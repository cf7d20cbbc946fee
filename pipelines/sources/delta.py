"""Delta tables as inputs: the live files of one version, and what they do not hold themselves.

Which files are live, the values of partition columns and which rows are deleted (deletion vectors)
stand in the log alone. deltalake reads the log; rows are read file by file, so that a table of any
size takes little memory and its rows always come in one order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from pipelines.sources.parts import Part, TableParts, file_rows, file_schema
from pipelines.storage.files import filesystem, first_line, list_names
from schemas.errors import ConfigError, NightshelfError, TableError, is_panic, quoted

_NAMES = "delta.columnMapping.physicalName"
_MODE = "delta.columnMapping.mode"
# What a reader must know of a table, and this one does.
_KNOWN = {
    "columnMapping",  # by name
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}


def read_delta(
    root: str,
    table: str,
    wanted: set[str] | None,
    *,
    version: int | None = None,
    partition: dict[str, str | None] | None = None,
) -> TableParts:
    """The parts of a Delta table at one version.

    Args:
        root: the table's folder.
        table: which input it is, for errors.
        wanted: columns that may be read; None: those that stand in the files.
        version: the latest where it is None.
        partition: only files with these values of partition columns, as text.

    Raises:
        TableError: there is no such version, or the table has a feature that is not known here.
        ConfigError: deltalake is not installed, or the store has no credentials.
        StorageError: the store does not answer.
    """
    found = _open(root, table, version)
    _check_features(found, root, table)
    schema, names = pa.schema(found.schema().to_arrow()), _names_in_files(found)
    keys = list(found.metadata().partition_columns)
    files = pa.table(found.get_add_actions(flatten=True)).to_pylist()
    if partition:
        files = [one for one in files if _is_in(one, partition, keys, names, root, table)]
    if partition and not files:
        raise _empty_partition(partition, root, table)
    columns = [f for f in schema if (wanted is None and f.name not in keys)]
    columns += [f for f in schema if wanted is not None and f.name in wanted]
    _check_inner_names(columns, root, table)
    kept = pa.schema([field.remove_metadata() for field in columns])
    deleted = _deletions(found, root, table)
    parts = []
    for one in sorted(files, key=lambda file: str(file["path"])):
        path = _place(root, str(one["path"]))
        values = {key: pa.scalar(_value_of(one, key, names)) for key in keys if key in kept.names}
        keep = deleted.pop(_bare(path), None)
        held = file_schema(path, table)
        parts.append(
            Part(
                path,
                plain=keep is None and not values and _is_as_it_stands(held, kept, names, found),
                schema=kept,
                rows=partial(file_rows, path, table, kept, values=values, names=names, keep=keep),
            )
        )
    if deleted:
        raise _unknown_deletions(next(iter(deleted)), root, table)
    return TableParts(
        tuple(parts),
        kept,
        snapshot=f"Delta version {found.version()}",
        identity=f"delta {found.metadata().id} {found.version()} {partition or ''}",
    )


def _unknown_deletions(path: str, root: str, table: str) -> TableError:
    return TableError(
        f"{table}: the Delta table has deletion vectors of files that are not known",
        got=path,
        where=root,
    )


def _empty_partition(partition: dict[str, str | None], root: str, table: str) -> TableError:
    return TableError(
        f"{table}: the Delta table has no rows in this partition",
        expected="rows of its latest version",
        got=", ".join(f"{key}={value}" for key, value in partition.items()),
        where=root,
    )


def _open(root: str, table: str, version: int | None) -> Any:
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError
    except ImportError as err:
        raise ConfigError(
            f"{table}: the path is a Delta table, and deltalake is not installed",
            got=first_line(err),
            where=root,
            do="Install it: pip install 'nightshelf[delta]'.",
            field=f"inputs.{table}",
        ) from err
    try:
        return DeltaTable(root, version=version, storage_options=_options(root))
    except (DeltaError, OSError, ValueError) as err:
        raise _unreadable(root, table, version, err) from err
    except BaseException as err:
        if not is_panic(err):
            raise
        raise _unreadable(root, table, version, err) from err


def _options(root: str) -> dict[str, str] | None:
    """What deltalake asks for beside the environment that other clients read: whoever names an
    endpoint of http means it.
    """
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = next((os.environ[name] for name in names if os.environ.get(name)), "")
    plain = root.startswith(("s3://", "s3a://")) and endpoint.startswith("http://")
    return {"AWS_ALLOW_HTTP": "true", "AWS_ENDPOINT_URL": endpoint} if plain else None


def _unreadable(root: str, table: str, version: int | None, error: BaseException) -> TableError:
    """The error of a table that does not open. What deltalake says of a store is text alone, so
    that the log is listed: a store without credentials, or that is away, is said by that.
    """
    log = f"{root.rstrip('/')}/_delta_log"
    try:
        names = list_names(log)
    except NightshelfError as err:
        err.what, err.field = f"{table}: {err.what}", f"inputs.{table}"
        raise
    at = "" if version is None else f", version {version}"
    return TableError(
        f"{table}: the Delta table cannot be opened",
        expected=f"a log in {log}{at}",
        got=" ".join(str(error).split())[:300] if names else "no file in it",
        where=root,
        field=f"inputs.{table}",
    )


def _check_features(found: Any, root: str, table: str) -> None:
    """Refuse what plain reading of files would get wrong."""
    protocol, settings = found.protocol(), found.metadata().configuration
    unknown = sorted(set(protocol.reader_features or ()) - _KNOWN)
    if protocol.min_reader_version > 3:
        unknown.append(f"reader version {protocol.min_reader_version}")
    if settings.get(_MODE, "none") not in ("none", "name"):
        unknown.append(f"column mapping by {settings[_MODE]}")
    if unknown:
        raise TableError(
            f"{table}: the Delta table has a feature that is not read here",
            expected=f"at most {', '.join(sorted(_KNOWN))}",
            got=", ".join(unknown),
            where=root,
            do="Write what it holds now to a plain table or to Parquet, and name that.",
        )


def _names_in_files(found: Any) -> dict[str, str]:
    """What columns are called in the files, where names are mapped."""
    if found.metadata().configuration.get(_MODE, "none") == "none":
        return {}
    fields = found.schema().fields
    return {field.name: str(field.metadata.get(_NAMES, field.name)) for field in fields}


def _check_inner_names(columns: list[pa.Field], root: str, table: str) -> None:
    """Refuse a column with fields inside that the files call otherwise: files are read by name."""
    for column in columns:
        for inner in _inside(column):
            name = (inner.metadata or {}).get(_NAMES.encode(), inner.name.encode()).decode()
            if name != inner.name:
                raise TableError(
                    f"{table}: the Delta table has a feature that is not read here",
                    expected="column mapping of whole columns",
                    got=f"column mapping inside a column: {column.name}.{inner.name} is {name!r}",
                    where=root,
                    do="Write what it holds now to a plain table or to Parquet, and name that.",
                    field=column.name,
                )


def _inside(field: pa.Field) -> Iterator[pa.Field]:
    for at in range(field.type.num_fields):
        inner = field.type.field(at)
        yield inner
        yield from _inside(inner)


def _deletions(found: Any, root: str, table: str) -> dict[str, pa.BooleanArray]:
    """Which rows of a file are kept, by the file's path; only of files with deleted rows."""
    if "deletionVectors" not in (found.protocol().reader_features or ()):
        return {}
    if not hasattr(found, "deletion_vectors"):
        raise TableError(
            f"{table}: the Delta table may have deletion vectors, which this deltalake lacks",
            where=root,
            do="Install a newer one: pip install --upgrade deltalake.",
        )
    rows = pa.RecordBatchReader.from_stream(found.deletion_vectors()).read_all()
    paths, masks = rows.column("filepath").to_pylist(), rows.column("selection_vector")
    return {_bare(unquote(path)): masks[at].values for at, path in enumerate(paths)}


def _is_as_it_stands(held: pa.Schema, kept: pa.Schema, names: dict[str, str], found: Any) -> bool:
    """Whether a file's own columns are those of the table."""
    if any(names.get(f.name, f.name) != f.name or f.name not in held.names for f in kept):
        return False
    widened = "typeWidening" in " ".join(found.protocol().reader_features or ())
    return not widened or all(held.field(f.name).type == f.type for f in kept)


def _value_of(file: dict[str, Any], key: str, names: dict[str, str]) -> Any:
    """A partition column's value of a file, of its own type."""
    for name in (f"partition.{key}", f"partition.{names.get(key, key)}"):
        if name in file:
            return file[name]
    return None


def _is_in(
    file: dict[str, Any],
    partition: dict[str, str | None],
    keys: list[str],
    names: dict[str, str],
    root: str,
    table: str,
) -> bool:
    if strange := [key for key in partition if key not in keys]:
        raise TableError(
            f"{table}: the path is a folder of a Delta table, and none of its partitions",
            expected=f"partition columns {', '.join(keys) or 'none'}",
            got=quoted(strange[0]),
            where=root,
            do="Name the table itself.",
        )
    return all(_as_text(_value_of(file, key, names)) == text for key, text in partition.items())


def _as_text(value: Any) -> str | None:
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _place(root: str, path: str) -> str:
    """Where a file of the log is: below the table, unless it is a URL of its own."""
    return path if "://" in path else f"{root.rstrip('/')}/{unquote(path)}"


def _bare(path: str) -> str:
    """A path without its protocol: the log's library and we may write that differently."""
    return filesystem(path)[1]

"""The published partition for serving stores: one record per user, in files by hash of the id.

A bulk loader takes a file per worker; a user is in the file `xxh64(utf8(user_id), seed 42) mod n`,
the hash of the run's own shards, so that an export of any date puts it in the same one. Lines are
sorted by user. `_SUCCESS` comes last; `manifest.json` has the number of records of each file.
Memory holds one of the files at a time.
"""

from __future__ import annotations

import io
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import polars as pl
import pyarrow as pa
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from pipelines.inputs.prepare import shard_of
from pipelines.publish import open_table
from pipelines.publish.rows import to_wide
from pipelines.storage import files
from schemas.errors import ConfigError, ConflictError
from schemas.settings import RunConfig

_PARTITION = ("ds", "surface")  # columns of Iceberg and Delta tables

ExportFormat = Literal["jsonl", "arrow"]


def export_partition(
    config: RunConfig, target: str, *, num_files: int, form: ExportFormat
) -> dict[str, int]:
    """Write the current rows of the configuration's date and surface below `target`.

    Returns:
        Records of each file, by its name.

    Raises:
        ConfigError: the target holds something else already.
        StorageError: nothing is published, or a file could not be written.
    """
    if files.list_names(target):
        raise ConfigError(
            "the target of an export is not empty", got=target, do="Choose a new folder."
        )
    counts: dict[str, int] = {}
    with TemporaryDirectory(prefix="nightshelf-export-") as folder:
        schema = _spill(config, Path(folder), num_files)
        for index in range(num_files):
            part = _one_row_per_user(_spilled(Path(folder), index, schema))
            name = f"part-{index:05d}.{form}"
            files.write_bytes(files.join(target, name), _encoded(part, config, form))
            counts[name] = len(part)
    files.write_json(
        files.join(target, "manifest.json"),
        {"ds": config.ds, "surface": config.surface, "files": counts, "format": form},
    )
    files.write_bytes(files.join(target, "_SUCCESS"), b"")
    return counts


@retry(retry=retry_if_exception_type(ConflictError), stop=stop_after_attempt(5), reraise=True)
def _spill(config: RunConfig, folder: Path, num_files: int) -> pa.Schema:
    """Spread the partition over local files by hash, as it streams by: memory holds a part of it.

    A publish that replaces the partition meanwhile makes it start again.
    """
    schema: pa.Schema | None = None
    with ExitStack() as stack:
        writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
        for part in open_table(config).parts():
            part = _without_partition(part)
            schema = schema or part.schema
            shard = shard_of(part.column("user_id").cast(pa.string()).to_pylist(), num_files)
            for index in np.unique(shard).tolist():
                if index not in writers:
                    path = str(_spill_path(folder, index))
                    writers[index] = stack.enter_context(pa.ipc.new_stream(path, schema))
                rows = part.take(pa.array(np.flatnonzero(shard == index)))
                writers[index].write_table(rows.cast(schema))
    if schema is None:  # a published partition may be empty
        schema = _without_partition(open_table(config).read()).schema
    for gone in range(num_files):  # of a try before, which another publish overtook
        if gone not in writers:
            _spill_path(folder, gone).unlink(missing_ok=True)
    return schema


def _without_partition(rows: pa.Table) -> pa.Table:
    return rows.drop_columns([name for name in _PARTITION if name in rows.column_names])


def _spill_path(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.arrows"


def _spilled(folder: Path, index: int, schema: pa.Schema) -> pa.Table:
    path = _spill_path(folder, index)
    if not path.exists():
        return schema.empty_table()
    with pa.OSFile(str(path), "rb") as stream:
        return pa.ipc.open_stream(stream).read_all()


def _one_row_per_user(rows: pa.Table) -> pa.Table:
    if "rank" not in rows.column_names:
        return rows.sort_by("user_id")
    return to_wide(rows.sort_by([("user_id", "ascending"), ("rank", "ascending")]))


def _encoded(part: pa.Table, config: RunConfig, form: ExportFormat) -> bytes:
    ds, surface = (
        pa.repeat(text, len(part)) if len(part) else pa.array([], pa.string())
        for text in (str(config.ds), config.surface)
    )
    part = part.append_column("ds", ds).append_column("surface", surface)
    buffer = io.BytesIO()
    if form == "arrow":
        with pa.ipc.new_stream(buffer, part.schema) as writer:
            writer.write_table(part)
    else:
        frame = pl.from_arrow(part)
        assert isinstance(frame, pl.DataFrame), "a table is a frame"
        frame.write_ndjson(buffer)
    return buffer.getvalue()

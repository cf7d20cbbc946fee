"""The published partition for serving stores: one record per user, in files by hash of the id.

A bulk loader takes a file per worker; a user is in the file `xxh64(utf8(user_id), seed 42) mod n`,
the hash of the run's own shards, so that an export of any date puts it in the same one. Lines are
sorted by user. `_SUCCESS` comes last; `manifest.json` has the number of records of each file.
"""

from __future__ import annotations

import io
from typing import Literal

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines import files
from pipelines.prepare import shard_of
from pipelines.publish import open_table
from pipelines.publish.rows import to_wide
from schemas.errors import ConfigError
from schemas.settings import RunConfig

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
    table = open_table(config).read()
    wide = to_wide(table) if "rank" in table.column_names else table
    wide = wide.drop_columns([n for n in ("ds", "surface") if n in wide.column_names])
    users = wide.column("user_id").cast(pa.string()).to_pylist()
    shard = shard_of(users, num_files)
    counts: dict[str, int] = {}
    for index in range(num_files):
        part = wide.take(pa.array(np.flatnonzero(shard == index))).sort_by("user_id")
        name = f"part-{index:05d}.{form}"
        files.write_bytes(files.join(target, name), _encoded(part, config, form))
        counts[name] = len(part)
    files.write_json(
        files.join(target, "manifest.json"),
        {"ds": config.ds, "surface": config.surface, "files": counts, "format": form},
    )
    files.write_bytes(files.join(target, "_SUCCESS"), b"")
    return counts


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

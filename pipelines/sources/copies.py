"""Copies of tables whose rows are not simply those of their files, in the work folder.

    <work_dir>/tables/<table>-<digest>/_done
    <work_dir>/tables/<table>-<digest>/<table>-<digest>/part-00000.parquet

The digest is of what the rows come from: the snapshot of a table with a log, or the files and the
names of their folders. The same snapshot is the same copy under the same name, so that it is made
once, and a run that begins anew is the same run. `_done` names the files and their hashes; a copy
that does not match it is made again.
"""

from __future__ import annotations

import json
import re

import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.sources.parts import Part, TableParts, file_identity
from pipelines.storage import files
from schemas.errors import RunError, StorageError

_DONE = "_done"
_LAYOUT = 1
_IS_COPY = re.compile(r"/tables/([A-Za-z0-9_.-]+-([0-9a-f]{16}))/\1/part-\d{5}\.parquet$")


class _Copied(BaseModel):
    """What `_done` says: each file's hash."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str
    parts: dict[str, str]


def version_of_copy(path: str) -> str | None:
    """What a copy's file is a copy of; None for any other file. Making it again changes nothing."""
    match = _IS_COPY.search(path)
    return f"copy-{match[2]}" if match else None


def copy_parts(work_dir: str, table: str, found: TableParts) -> list[str]:
    """The files of a table's copy, made if it is not there or damaged.

    Raises:
        TableError: a file of the table is damaged.
        StorageError: the copy could not be written.
    """
    told = [_LAYOUT, found.identity, str(found.schema.remove_metadata())]
    told += [f"{part.path} {part.identity}" for part in found.parts]
    name = f"{table}-{files.hash_bytes(json.dumps(told).encode())[:16]}"
    folder = files.join(work_dir, "tables", name)
    inside = files.join(folder, name)
    names = [f"part-{at:05d}.parquet" for at in range(max(1, len(found.parts)))]
    paths = [files.join(inside, one) for one in names]
    if _is_whole(folder, names):
        return paths
    hashes = {}
    for at, path in enumerate(paths):
        _write(path, found, found.parts[at] if found.parts else None)
        hashes[names[at]] = files.hash_file(path)
    done = _Copied(folder=name, parts=hashes)
    files.write_json(files.join(folder, _DONE), done.model_dump())
    return paths


def _write(path: str, found: TableParts, part: Part | None) -> None:
    schema = found.schema if part is None else part.schema
    with files.atomic_target(path) as target:
        fs, inside = files.filesystem(target)
        with (
            fs.open(inside, "wb") as handle,
            pq.ParquetWriter(handle, schema, compression="zstd", write_page_checksum=True) as out,
        ):
            for batch in part.rows() if part is not None else ():
                out.write_batch(batch)
        if part is not None and part.identity and file_identity(part.path) != part.identity:
            raise RunError(
                "an input file was changed while it was read",
                where=part.path,
                do="Run the same command again when nobody writes to the table.",
            )


def _is_whole(folder: str, names: list[str]) -> bool:
    """Whether a copy is there, and every file is as it was written."""
    path = files.join(folder, _DONE)
    try:
        done = _Copied.model_validate(files.read_json(path))
        if sorted(done.parts) != names:
            return False
        inside = files.join(folder, done.folder)
        return all(
            files.hash_file(files.join(inside, name)) == value for name, value in done.parts.items()
        )
    except (FileNotFoundError, ValidationError, StorageError):
        return False

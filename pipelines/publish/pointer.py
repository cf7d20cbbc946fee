"""Pointers: which files are a Parquet partition's rows now. Publishing is creating the next one.

    <output.path>.current/ds=…/surface=…/00000007.json

The file with the highest number counts. It is whole when it appears, and nobody replaces it: a
publisher that started from number 6 creates number 7, and of two that try, one finds it taken. So
there is no lock to go stale, on a disk (a hard link to a finished file) or in an object store (a
put that fails when the name exists: S3, Google Cloud Storage and Azure have it).
"""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict

from pipelines import files
from pipelines.publish.names import partition_name, pointer_root
from schemas.errors import ConflictError

_NAME = re.compile(r"^(\d{8})\.json$")
_KEPT = 50  # pointers that stay as the partition's history


class PointedFile(BaseModel):
    """One file of the partition."""

    model_config = ConfigDict(frozen=True)

    name: str
    rows: int
    bytes: int


class Pointer(BaseModel):
    """The rows of a partition: these files, below the table's root in `partition`."""

    model_config = ConfigDict(frozen=True)

    generation: int
    token: str  # tells two pointers of one number apart
    run_id: str
    ds: str
    surface: str
    layout: str
    partition: str
    files: tuple[PointedFile, ...]
    rows: int
    published_at: str


def pointer_folder(path: str, ds: str, surface: str) -> str:
    """Where the pointers of one partition are."""
    return files.join(pointer_root(path), partition_name(ds, surface))


def generations(folder: str) -> list[int]:
    """Numbers of the pointers that are there, the highest first."""
    found = (_NAME.match(name) for name in files.list_names(folder))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def latest(folder: str) -> Pointer | None:
    """The pointer that counts; None when there is none.

    Raises:
        StorageError: it is damaged.
    """
    while numbers := generations(folder):
        try:
            return load(folder, numbers[0])
        except FileNotFoundError:  # fifty publishes since the listing
            continue
    return None


def load(folder: str, generation: int) -> Pointer:
    """One pointer."""
    return Pointer.model_validate(files.read_json(_path(folder, generation)))


def create(folder: str, pointer: Pointer) -> None:
    """Make a pointer the one that counts.

    Raises:
        ConflictError: its number is taken, or has been.
    """
    path = _path(folder, pointer.generation)
    data = (pointer.model_dump_json(indent=1) + "\n").encode()
    if not files.create(path, data) and load(folder, pointer.generation).token != pointer.token:
        raise conflict(pointer.ds, pointer.surface, path)
    # Also true where a store lets the second put win, or where the number had been cleared away.
    now = latest(folder)
    if now is None or now.token != pointer.token:
        raise conflict(pointer.ds, pointer.surface, path)
    for old in generations(folder)[_KEPT:]:
        files.remove_if_there(_path(folder, old))


def conflict(ds: str, surface: str, where: str) -> ConflictError:
    """The error of a publisher that was overtaken."""
    return ConflictError(
        "another publisher changed this partition at the same time",
        got=f"ds {ds}, surface {surface!r}",
        where=where,
        do="What it published stands. Running the same command again is safe, and replaces it.",
    )


def _path(folder: str, generation: int) -> str:
    return files.join(folder, f"{generation:08d}.json")

"""Pointers: which files are a Parquet partition's rows now. Publishing is creating the next one.

    <output.path>.current/ds=…/surface=…/00000007.json

The file with the highest number counts. It is whole when it appears, and nobody replaces it: a
publisher that started from number 6 creates number 7, and of two that try, one finds it taken. So
there is no lock to go stale, on a disk (a hard link to a finished file) or in an object store (a
put that fails when the name exists: S3, Google Cloud Storage and Azure have it).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.publish.names import partition_name, pointer_root
from pipelines.storage import files
from schemas.errors import ConflictError, RecordError, StorageError
from schemas.records import Stored

_NAME = re.compile(r"^(\d{8})\.json$")
_KEPT = 50  # pointers that stay as the partition's history


class DamagedPointerError(StorageError):
    """A pointer was read, and its content is none."""


class PointedFile(BaseModel):
    """One file of the partition."""

    model_config = ConfigDict(frozen=True)

    name: str
    rows: int
    bytes: int
    xxh3: str = ""  # of the content; empty in pointers of older versions


class Pointer(Stored):
    """The rows of a partition: these files, below the table's root in `partition`."""

    NAME: ClassVar[str] = "a pointer of the table"

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
    withdrawn: tuple[str, ...] = ()  # runs that are not to be published here again, latest last


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
            return next((p for p in (_load(folder, number) for number in numbers) if p), None)
        except FileNotFoundError:  # fifty publishes since the listing
            continue
    return None


def load(folder: str, generation: int) -> Pointer:
    """One pointer.

    Raises:
        StorageError: it is damaged.
    """
    found = _load(folder, generation)
    if found is None:
        raise _damaged(_path(folder, generation), "no content")
    return found


def history(folder: str) -> list[Pointer]:
    """The pointers that are left, the newest first."""
    return list(readable(folder))


def readable(folder: str) -> Iterator[Pointer]:
    """The pointers that are left and undamaged, the newest first.

    Raises:
        RecordError: another release can read it: it is not to be passed over.
        AccessError, StorageError: it could not be had, and the next time it may be. An older one
            in its place would forget what was published or withdrawn since.
    """
    for number in generations(folder):
        try:
            found = _load(folder, number)
        except (DamagedPointerError, FileNotFoundError):
            continue
        if found is not None:
            yield found


def unreadable(folder: str) -> list[int]:
    """Numbers of the pointers that are damaged."""
    found = {pointer.generation for pointer in readable(folder)}
    return [number for number in generations(folder) if number not in found]


def _load(folder: str, generation: int) -> Pointer | None:
    """One pointer; None where it is not there yet: on a mount without hard links its name comes
    before its content.
    """
    path = _path(folder, generation)
    data = files.read_bytes(path)
    if not data:
        return None
    try:
        return Pointer.model_validate_json(data)
    except RecordError as err:
        err.where = path
        raise
    except ValidationError as err:
        raise _damaged(path, files.first_line(err)) from err


def _damaged(path: str, why: str) -> DamagedPointerError:
    return DamagedPointerError(
        "a pointer of the table is damaged",
        got=why,
        where=path,
        do="Publishing again replaces it: run the same command again.",
    )


def create(folder: str, pointer: Pointer) -> None:
    """Make a pointer the one that counts.

    Raises:
        ConflictError: its number is taken, or has been.
    """
    path = _path(folder, pointer.generation)
    data = (pointer.model_dump_json(indent=1) + "\n").encode()
    if not files.create(path, data) and _token(folder, pointer.generation) != pointer.token:
        raise conflict(pointer.ds, pointer.surface, path)
    # Also true where a store lets the second put win, or where the number had been cleared away.
    now = latest(folder)
    if now is None or now.token != pointer.token:
        raise conflict(pointer.ds, pointer.surface, path)
    for old in generations(folder)[_KEPT:]:
        files.remove_if_there(_path(folder, old))


def _token(folder: str, generation: int) -> str:
    """Whose pointer has taken a number; empty where that cannot be told at this moment."""
    try:
        found = _load(folder, generation)
    except FileNotFoundError:
        return ""
    return found.token if found is not None else ""


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

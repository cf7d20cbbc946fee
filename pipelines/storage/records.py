"""Read a record of a run or of a table from its file; schemas/records.py says what a record is."""

from __future__ import annotations

from typing import TypeVar

from pipelines.storage import files
from schemas.records import Stored, parse_record

R = TypeVar("R", bound=Stored)


def read_record(model: type[R], path: str) -> R:
    """The record in a file.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it is of a release with another format.
        StorageError: it is damaged.
    """
    return parse_record(model, files.read_json(path), path)

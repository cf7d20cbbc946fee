"""Records: what a run leaves behind as JSON, and how another release reads it.

A record says its `format`; one without was written before there were formats, and is read as the
first. Within a format fields are only added, with a default: a reader takes what it knows, and what
it does not know changes nothing of it. What would change the meaning gets the next format, and
a reader that does not know that one says so instead of guessing.

The configuration inside a record is read as far as it can be (`recorded_config`): settings come and
go between releases, and a run of last month must still be looked at, rolled back and cleared away.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from schemas.config_file import place_of
from schemas.errors import ConfigError, RecordError, StorageError, quoted
from schemas.section import LENIENT
from schemas.settings import RunConfig

FORMAT = 1  # of every record that this release writes
_ROUNDS = 100  # a round leaves out at least one setting

R = TypeVar("R", bound="Stored")


class Record(BaseModel):
    """A part of a record."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Stored(Record):
    """A record that is a file of its own."""

    NAME: ClassVar[str] = "a record"

    format: int = FORMAT

    @model_validator(mode="before")
    @classmethod
    def _known_format(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "format" not in raw:
            return raw
        found = raw["format"]
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= FORMAT:
            raise RecordError(
                f"{cls.NAME} was written by another release",
                expected=f"format {FORMAT} or older",
                got=f"format {quoted(found)}",
                do="Use the release of nightshelf that wrote it, or a later one.",
            )
        return {**raw, "format": FORMAT}


def parse_record(model: type[R], raw: Any, where: str) -> R:
    """A record, from what its JSON says.

    Raises:
        RecordError: it has a format that this release does not know.
        StorageError: it is not what such a record is.
    """
    try:
        return model.model_validate(raw)
    except RecordError as err:
        err.where = err.where or where
        raise
    except ValidationError as err:
        first = err.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        more = f", and {err.error_count() - 1} more" if err.error_count() > 1 else ""
        raise StorageError(
            f"{model.NAME} cannot be read",
            expected=f"what this release writes (format {FORMAT})",
            got=(f"{place}: " if place else "") + message[:1].lower() + message[1:] + more,
            where=where,
            do="It is damaged, or of another release. What is published is unchanged.",
        ) from None


def recorded_config(raw: Any) -> tuple[Any, tuple[str, ...]]:
    """The configuration of a record, and the settings of it that this release cannot read.

    A setting that was added since has its default; one that is unknown, or has a value that is not
    allowed any more, is left out and named. Raises nothing: what cannot be read at all comes back
    as it was, for the model that it is part of to refuse.
    """
    if not isinstance(raw, dict):
        return raw, ()
    left, unread = copy.deepcopy(raw), list[str]()
    for _ in range(_ROUNDS):
        try:
            return RunConfig.model_validate(left, context={LENIENT: True}), tuple(unread)
        except ValidationError as err:
            places = {place_of(detail, left) for detail in err.errors()}
        except ConfigError as err:
            places = {tuple((err.field or "").split("."))}
        removed = [place for place in places if _remove(left, place)]
        if not removed:
            return left, ()
        unread += sorted({".".join(_names(place)) for place in removed})
    return left, ()


def _names(place: tuple[str | int, ...]) -> list[str]:
    return [key for key in place if isinstance(key, str)]


def _remove(raw: dict[str, Any], place: tuple[str | int, ...]) -> bool:
    """Take a setting out; of one inside a list, the list."""
    node: Any = raw
    names = _names(place)
    for key in names[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    return bool(names) and isinstance(node, dict) and node.pop(names[-1], raw) is not raw

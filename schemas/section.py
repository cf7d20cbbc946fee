"""What every section of a configuration has in common: how it is read, and kinds of values."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
)

from schemas.errors import ConfigError
from schemas.places import place, written_place


class Section(BaseModel):
    """A section: unknown keys are errors, values are checked, defaults too, and never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


def one_line(text: str) -> str:
    """The text; `ValueError` where it holds what no name does."""
    if bad := next((char for char in text if unicodedata.category(char) in _CONTROLS), None):
        raise ValueError(f"a name holds no control character and no line break: U+{ord(bad):04X}")
    return text


_CONTROLS = ("Cc", "Zl", "Zp")
# Every number has a most: what sizes memory is refused before it is allocated. A setting's own
# bound comes behind these, as Annotated[Positive, Field(le=…)].
Positive = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]  # true is no number
Count = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
Number = Annotated[float, Field(ge=0.0, le=1e6, strict=True)]
Seconds = Annotated[float, Field(gt=0.0, le=31_536_000.0, strict=True)]  # a year
Share = Annotated[float, Field(ge=0.0, le=1.0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]  # 1 and "yes" are no booleans
Name = Annotated[str, Field(min_length=1), AfterValidator(one_line)]  # of a table, a column
Place = Annotated[str, AfterValidator(place), AfterValidator(one_line)]  # leads somewhere
Written = Annotated[str, AfterValidator(written_place), AfterValidator(one_line)]  # is written to
LENIENT = "lenient"  # validation context: settings that do not fit together are left to `conflicts`
LONGEST_LIST = 100_000  # items of a list, and beams that search for them


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Errors of the block are about this setting, where they name none."""
    try:
        yield
    except ConfigError as err:
        err.field = err.field or field
        raise

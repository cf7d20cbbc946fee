"""What every section of a configuration has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
)

from schemas.places import place


class Section(BaseModel):
    """A section: unknown keys are errors, values are checked, defaults too, and never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


Positive = Annotated[int, Field(ge=1, strict=True)]  # true is no number
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Place = Annotated[str, AfterValidator(place)]  # a path or URL that leads somewhere
LENIENT = "lenient"  # validation context: settings that do not fit together are left to `conflicts`

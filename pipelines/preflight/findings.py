"""What a look before a run found: problems that stop it, warnings that do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from schemas.errors import ConfigError, InputError, NightshelfError

Kind = Literal["config", "input"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, where, and what to do. `field` is a setting or a column."""

    kind: Kind
    file: str
    field: str
    message: str
    expected: str | None = None
    got: str | None = None
    remedy: str


@dataclass
class Findings:
    """Problems and warnings in the order they were found, each once."""

    config_file: str = ""  # where settings are, when an error does not say
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0; or 3 when an input is wrong, else 2 when a setting is."""
        if any(p.kind == "input" for p in self.problems):
            return InputError.exit_code
        return ConfigError.exit_code if self.problems else 0

    def add(self, problem: Problem) -> None:
        """A problem."""
        if problem not in self.problems:
            self.problems.append(problem)

    def warn(self, problem: Problem) -> None:
        """Something that stops nothing."""
        if problem not in self.warnings:
            self.warnings.append(problem)

    def add_error(
        self, error: NightshelfError, *, file: str = "", field: str = "", remedy: str = ""
    ) -> None:
        """An error as a problem; what it does not say itself is taken from the arguments."""
        kind: Kind = "config" if isinstance(error, ConfigError) else "input"
        self.add(
            Problem(
                kind=kind,
                file=error.where or file or self.config_file,
                field=error.field or field,
                message=error.what,
                expected=error.expected,
                got=error.got,
                remedy=error.do or remedy or _remedy(error),
            )
        )

    @contextmanager
    def collecting(self, *, file: str = "", field: str = "", remedy: str = "") -> Iterator[None]:
        """Turn an error raised inside into a problem, and go on behind the block."""
        try:
            yield
        except NightshelfError as err:
            self.add_error(err, file=file, field=field, remedy=remedy)


def _remedy(error: NightshelfError) -> str:
    """What to do where an error says only what it expected."""
    name = error.field or "it"
    if error.expected:
        return f"Make {name} {error.expected}."
    return f"Correct {name}, or take it out."

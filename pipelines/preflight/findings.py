"""What a look before a run found: problems that stop it, warnings that do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from schemas.config_file import Sources
from schemas.errors import ConfigError, InputError, NightshelfError, StorageError

Kind = Literal["config", "input", "storage"]
_LINE = re.compile(r"(.+):([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, where, and what to do. `field` is a setting or a column; `line` that
    of the configuration, none where an argument set it: then `file` names the argument.
    """

    kind: Kind
    file: str
    line: int | None = None
    field: str
    message: str
    expected: str | None = None
    got: str | None = None
    remedy: str


@dataclass
class Findings:
    """Problems and warnings in the order they were found, each once."""

    config_file: str = ""  # where settings are, when an error does not say
    sources: Sources | None = None  # the lines of settings, once the file could be read
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0; or 3 when an input is wrong, else 2 when a setting is, else 4: a disk or a store keeps
        the rest from being told now.
        """
        kinds = {problem.kind for problem in self.problems}
        for kind, error in (("input", InputError), ("config", ConfigError)):
            if kind in kinds:
                return error.exit_code
        return StorageError.exit_code if kinds else 0

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
        if isinstance(error, StorageError):
            kind = "storage"
        where = error.where or file
        if not where and self.sources is not None and kind == "config":
            where = self.sources.where_named(error.field or field)
        lined = _LINE.fullmatch(where) if kind == "config" else None
        self.add(
            Problem(
                kind=kind,
                file=lined[1] if lined else where or self.config_file,
                line=int(lined[2]) if lined else None,
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

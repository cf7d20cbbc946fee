"""What `--help` shows beside each command's own words, and a command line that cannot be read.

typer prints what is wrong to stderr and ends with 2. A scheduler that asked for `--output json`
reads the last line of stdout, which is then the error, as with every other error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# typer carries a click of its own and does not name the base of its usage errors; it is this.
_UsageError: Any = typer.BadParameter.__mro__[1]


class PlainCommand(TyperCommand):
    """A flag is a flag: no `<bool>` beside it."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, flags without the name of a type."""
        return _plain(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """The same for a command that has commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, flags without the name of a type."""
        return _plain(super().get_params(ctx))


class Root(PlainGroup):
    """The command itself, whose usage errors are said in JSON where that is asked for."""

    def make_context(self, info_name: Any, args: list[str], *more: Any, **extra: Any) -> Any:
        """Read the options before the command's name."""
        self._line = list(args)
        with _usage_errors_in_json(self._line):
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Read the command's own line, and run it."""
        with _usage_errors_in_json(self._line):
            return super().invoke(ctx)


def _plain(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def examples(lines: Sequence[str]) -> str | None:
    """What a command's page ends with."""
    if not lines:
        return None
    return "\n".join(["Examples:", *(f"  nightshelf {line}" for line in lines)])


@contextmanager
def _usage_errors_in_json(args: Sequence[str]) -> Iterator[None]:
    """Print a usage error as JSON, where the arguments ask for that, and let it go on."""
    try:
        yield
    except _UsageError as err:
        if _wants_json(args):
            error = {"kind": "usage", "exit_code": 2, "message": err.format_message()}
            typer.echo(json.dumps({"status": "failed", "error": error}))
        raise


def _wants_json(args: Sequence[str]) -> bool:
    named = {after for flag, after in zip(args, args[1:], strict=False) if flag == "--output"}
    return "json" in named or "--output=json" in args

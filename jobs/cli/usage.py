"""A command line that cannot be read, said to machines too.

typer prints what is wrong to stderr and ends with 2. A scheduler that asked for `--output json`
reads the last line of stdout, which is then the error, as with every other error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

# typer carries a click of its own and does not name the base of its usage errors; it is this.
UsageError: Any = typer.BadParameter.__mro__[1]


@contextmanager
def said_in_json(args: Sequence[str]) -> Iterator[None]:
    """Print a usage error as JSON, where the arguments ask for that, and let it go on."""
    try:
        yield
    except UsageError as err:
        if _wants_json(args):
            error = {"kind": "usage", "exit_code": 2, "message": err.format_message()}
            typer.echo(json.dumps({"status": "failed", "error": error}))
        raise


def _wants_json(args: Sequence[str]) -> bool:
    named = {after for flag, after in zip(args, args[1:], strict=False) if flag == "--output"}
    return "json" in named or "--output=json" in args

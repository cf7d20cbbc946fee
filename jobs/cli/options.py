"""What the commands share: their arguments, their consoles, and how an error ends one."""

from __future__ import annotations

import datetime as dt
import functools
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from jobs.running.ending import (
    EXIT_CODE,
    Terminated,
    asked_to_end,
    ends_on_sigterm,
    no_more_interruptions,
)
from schemas.config_file import nothing_read_yet, with_its_line
from schemas.errors import ConfigError, NightshelfError, RunError, is_panic, quoted
from schemas.places import place


class Output(StrEnum):
    """Form of the result on stdout."""

    text = "text"
    json = "json"


class LogFormat(StrEnum):
    """Form of what is said on stderr while a run works."""

    text = "text"
    json = "json"


LogFormatOption = Annotated[
    LogFormat, typer.Option("--log-format", help="json: one JSON object per line on stderr.")
]
ConfigArg = Annotated[str, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
DsOption = Annotated[
    str | None,
    typer.Option("--ds", metavar="YYYY-MM-DD", help="Partition date; wins over the file."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Override one setting; may be repeated."),
]
OutputOption = Annotated[
    Output, typer.Option("--output", help="text for people, json for machines.")
]
RepublishOption = Annotated[
    bool, typer.Option("--republish", help="Also a run that was taken back.")
]
_DebugOption = Annotated[bool, typer.Option("--debug", help="Show the stack trace of an error.")]


def stderr() -> Console:
    """Where progress goes."""
    return Console(stderr=True)


def stdout() -> Console:
    """Where results for people go."""
    # A table that is piped keeps its width; a terminal decides for itself.
    return Console() if sys.stdout.isatty() else Console(width=int(os.environ.get("COLUMNS", 110)))


def guarded(body: Callable[..., None]) -> Callable[..., None]:
    """A command as typer takes it: with `--debug`, and its errors as messages and exit codes."""

    @functools.wraps(body)
    def command(*, debug: bool = False, **given: Any) -> None:
        output = given.get("output", Output.text)
        log_format = given.get("log_format", LogFormat.text)
        guard(lambda: body(**given), output, debug, log_format)

    own = inspect.signature(body, eval_str=True)
    debug = inspect.Parameter(
        "debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_DebugOption
    )
    signature = own.replace(parameters=[*own.parameters.values(), debug])
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def guard(
    body: Callable[[], None],
    output: Output,
    debug: bool,
    log_format: LogFormat = LogFormat.text,
) -> None:
    """Run a command; turn what goes wrong into a message and an exit code."""
    reported: list[str] = []
    nothing_read_yet()

    def terminated() -> None:
        if reported:
            return
        message = "ended by SIGTERM; run the same command again to continue"
        error = {"kind": "terminated", "exit_code": EXIT_CODE, "message": message}
        reported.append(message)
        _print_error(output, log_format, message, error)

    with ends_on_sigterm(terminated):
        try:
            _guarded(body, output, debug, log_format)
        except Terminated as err:
            terminated()
            raise typer.Exit(EXIT_CODE) from err


def place_option(path: str) -> str:
    """What a path on the command line names, as the same path in a configuration: for an option's
    `callback`.

    Raises:
        typer.BadParameter: it names no place.
    """
    try:
        return place(path)
    except ValueError as err:
        raise typer.BadParameter(f"{err}, got {quoted(path)}") from err


def maybe_place_option(path: str | None) -> str | None:
    """`place_option` of an option that may be left out."""
    return None if path is None else place_option(path)


def _guarded(body: Callable[[], None], output: Output, debug: bool, log_format: LogFormat) -> None:
    try:
        body()
    except KeyboardInterrupt:
        message = "interrupted; run the same command again to continue"
        error = {"kind": "interrupted", "exit_code": 130, "message": message}
        _exit_with(output, log_format, message, 130, error)
    except (SystemExit, GeneratorExit, typer.Exit, Terminated):
        raise
    except BaseException as err:  # the last resort, panics of Rust libraries included
        if debug:
            traceback.print_exc()
        if asked_to_end():  # a library made an error of the interruption
            raise Terminated from err
        known = err if isinstance(err, NightshelfError) else _as_our_error(err)
        if known is not None:
            if isinstance(known, ConfigError):
                known = with_its_line(known)
            _exit_with(output, log_format, str(known), known.exit_code, known.as_json())
        message = f"unexpected {type(err).__name__}: {err}. Run with --debug for the stack trace"
        error = {"kind": "unexpected", "exit_code": 1, "message": message}
        _exit_with(output, log_format, message, 1, error)


def _as_our_error(error: BaseException) -> NightshelfError | None:
    """One of ours for what libraries, disks and memory do; None for a fault of ours."""
    from pipelines.storage.storage_errors import first_line, translate  # loads Arrow and polars

    if is_panic(error) or isinstance(error, MemoryError):
        short = isinstance(error, MemoryError)
        return RunError(
            "memory ran out" if short else "a library broke off",
            got=first_line(error),
            do="Use fewer workers or a smaller run.shard_users, then run the same command again."
            if short
            else "Run the same command again; with --debug it shows where.",
        )
    return translate(error, str(getattr(error, "filename", None) or ""), done="read or written")


def _exit_with(
    output: Output, log_format: LogFormat, message: str, code: int, error: dict[str, Any]
) -> NoReturn:
    no_more_interruptions()
    _print_error(output, log_format, message, error)
    raise typer.Exit(code)


def _print_error(
    output: Output, log_format: LogFormat, message: str, error: dict[str, Any]
) -> None:
    line = f"nightshelf: {message}"
    if log_format is LogFormat.json:
        ts = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"ts": ts, "event": "error", **error})
    typer.echo(line, err=True)
    if output is Output.json:
        typer.echo(json.dumps({"status": "failed", "error": error}))

"""`nightshelf doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from engine.backends.registry import spec_of
from jobs.cli.options import Output, OutputOption, guarded, stdout
from jobs.upkeep.doctor import run_doctor
from schemas.checks import Check
from schemas.engine_settings import DEFAULT_BACKEND
from schemas.errors import EngineError


@guarded
def doctor(
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="The backend that runs will use.")
    ] = DEFAULT_BACKEND,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Load this model too, and score with it.")
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Check this machine, with a tiny self-test of scoring.

    Packages, devices, Java and disks.
    Exit 0: ready; 5: something is missing or wrong, and the last column says what to do.
    """
    spec_of(backend)  # a name that nobody knows is a mistake of the command line
    checks = list(run_doctor(backend, model))
    _print(checks, output)
    if not all(check.ok for check in checks):
        raise typer.Exit(EngineError.exit_code)


def _print(checks: list[Check], output: Output) -> None:
    bad = [check for check in checks if not check.ok]
    if output is Output.json:
        status = "failed" if bad else "ok"
        typer.echo(json.dumps({"status": status, "checks": [asdict(check) for check in checks]}))
        return
    table = Table()
    table.add_column("")
    table.add_column("check", overflow="fold", ratio=3)
    table.add_column("found", overflow="fold", ratio=4)
    table.add_column("what to do", overflow="fold", ratio=4)
    for check in checks:
        row = (check.name, check.detail, check.remedy)
        mark = "[green]ok[/]" if check.ok else "[bold red]fails[/]"
        table.add_row(mark, *map(escape, row))
    console = stdout()
    console.print(table)
    names = ", ".join(check.name for check in bad)
    console.print(
        f"{len(bad)} of {len(checks)} checks fail: {escape(names)}" if bad else "ready",
        highlight=False,
    )

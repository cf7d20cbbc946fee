"""`nightshelf validate`: everything that is wrong with a configuration and its inputs, at once."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jobs.cli.options import (
    ConfigArg,
    DsOption,
    Output,
    OutputOption,
    SetOption,
    guarded,
    stdout,
)
from jobs.launchers import LauncherOption, open_launcher
from pipelines.preflight import Findings, Problem, preflight
from schemas.config_file import load_config
from schemas.errors import ConfigError


@guarded
def validate(
    config: ConfigArg,
    ds: DsOption = None,
    set_: SetOption = None,
    launcher: LauncherOption = None,
    output: OutputOption = Output.text,
) -> None:
    """List every problem of a configuration and its inputs at once.

    Exit 0: a run can start (there may be warnings); 2: only settings are wrong; 3: an input is,
    the model's folder included.
    """
    found = preflight(config, overrides=set_, ds=ds)
    _ask_launcher(found, launcher, config, set_, ds)
    _print(found, config, output)
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _ask_launcher(
    findings: Findings,
    launcher: str | None,
    config: str,
    overrides: list[str] | None,
    ds: str | None,
) -> None:
    """What the launcher alone knows: tables of Spark's catalog. Starts Spark for them only."""
    try:
        loaded = load_config(config, overrides=overrides or [], ds=ds)
    except ConfigError:
        return  # said already
    with findings.collecting(), open_launcher(launcher, loaded) as asked:
        for problem in asked.problems(loaded):
            findings.add_error(problem)


def _print(findings: Findings, config: str, output: Output) -> None:
    if output is Output.json:
        report = {
            "status": "invalid" if findings.problems else "valid",
            "exit_code": findings.exit_code,
            "problems": [asdict(p) for p in findings.problems],
            "warnings": [asdict(p) for p in findings.warnings],
        }
        typer.echo(json.dumps(report))
        return
    console = stdout()
    _print_table(console, "problem", findings.problems)
    _print_table(console, "warning", findings.warnings)
    if not findings.problems:
        say = "no problems: a run can start" + (", see the warnings" if findings.warnings else "")
        console.print(f"{escape(config)}: {say}", highlight=False, soft_wrap=True)


def _print_table(console: Console, word: str, problems: list[Problem]) -> None:
    if not problems:
        return
    title = f"{len(problems)} {word}{'' if len(problems) == 1 else 's'}"
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("#", justify="right")
    table.add_column("where", overflow="fold", ratio=3)
    table.add_column("what is wrong", overflow="fold", ratio=4)
    table.add_column("what to do", overflow="fold", ratio=3)
    for number, problem in enumerate(problems, 1):
        facts = [problem.message]
        facts += [f"expected: {problem.expected}"] if problem.expected else []
        facts += [f"got: {problem.got}"] if problem.got else []
        where = "\n".join(part for part in (problem.field, _place(problem)) if part)
        table.add_row(str(number), *map(escape, (where, "\n".join(facts), problem.remedy)))
    console.print(table)


def _place(problem: Problem) -> str:
    """The file, relative to the current folder where it is below it, and the line."""
    short = problem.file.removeprefix(os.getcwd() + os.sep)
    return short if problem.line is None else f"{short}:{problem.line}"

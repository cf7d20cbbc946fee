"""`nightshelf report`: the page of a run that has ended, written again."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from jobs.launchers import LauncherOption
from jobs.options import (
    DebugOption,
    DsOption,
    LogFormat,
    LogFormatOption,
    Output,
    OutputOption,
    SetOption,
    guard,
    stderr,
    stdout,
)
from jobs.progress import open_progress
from jobs.run import load_manifest, report_of
from jobs.run_lock import only_run_of
from jobs.steps_cli import RunIdOption, TargetArg, the_run


def report(
    target: TargetArg,
    users: Annotated[
        list[str] | None,
        typer.Option("--user", metavar="ID", help="A user to show besides; may be repeated."),
    ] = None,
    run_id: RunIdOption = None,
    ds: DsOption = None,
    set_: SetOption = None,
    launcher: LauncherOption = None,
    log_format: LogFormatOption = LogFormat.text,
    output: OutputOption = Output.text,
    debug: DebugOption = False,
) -> None:
    """Write a run's page again, with users of your choice.

    Every run writes its page, report.html in its folder, when it ends.
    """

    def body() -> None:
        with (
            the_run(target, run_id, ds, set_, launcher, same_model=False) as (plan, _),
            only_run_of(plan),
            open_progress(stderr(), log_format) as progress,
        ):
            progress.step("report")
            manifest = report_of(load_manifest(plan), users or [])
        if output is Output.json:
            found = {"run_id": plan.run_id, "status": manifest.status, "report": manifest.report}
            typer.echo(json.dumps(found))
        else:
            stdout().print(manifest.report, highlight=False, soft_wrap=True)

    guard(body, output, debug, log_format)

"""`nightshelf report`: the page of a run that has ended, written again."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from jobs.cli.options import (
    DsOption,
    LogFormat,
    LogFormatOption,
    Output,
    OutputOption,
    SetOption,
    guarded,
    stderr,
    stdout,
)
from jobs.cli.progress import open_progress
from jobs.cli.steps import RunIdOption, TargetArg, the_plan
from jobs.launchers import LauncherOption, open_launcher
from jobs.running.manifest import report_of
from jobs.running.run_folder import load_manifest, manifest_path
from jobs.running.run_lock import only_run_of
from jobs.upkeep.run_states import published_plan
from pipelines.planning.plan import plan_run
from pipelines.storage import files
from schemas.errors import EngineError, InputError, NightshelfError, StorageError
from schemas.runs import RunPlan


def _ended_run(
    target: str,
    run_id: str | None,
    ds: str | None,
    set_: list[str] | None,
    launcher: str | None,
) -> RunPlan:
    """The run of a folder or an id. Of a configuration, the one that its inputs give now, where
    that has ended; else, since an input has changed or is gone, the one that readers see.
    """
    found = the_plan(target, run_id, ds, set_, same_model=False)
    if isinstance(found, RunPlan):
        return found
    asked: RunPlan | NightshelfError
    try:
        with open_launcher(launcher, found) as chosen:
            asked = plan_run(chosen.locate(found))
        if files.exists(manifest_path(asked.run_dir)):
            return asked
    except (InputError, EngineError) as err:
        asked = err
    try:
        return published_plan(found)
    except StorageError:  # nothing is published, or its folder is gone
        if isinstance(asked, NightshelfError):
            raise asked from None
        return asked


@guarded
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
) -> None:
    """Write a run's page again, with users of your choice.

    Every run writes its page, report.html in its folder, when it ends.
    """

    plan = _ended_run(target, run_id, ds, set_, launcher)
    with (
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

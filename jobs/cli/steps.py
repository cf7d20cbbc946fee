"""The steps of a run, one command each, for schedulers that retry them one by one.

A step takes the configuration, as `run` does, or a run that is planned already, by its folder or
its id, so that a step cannot slip into another run when an input changes in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.table import Table

from jobs.cli.options import (
    DsOption,
    LogFormat,
    LogFormatOption,
    Output,
    OutputOption,
    RepublishOption,
    SetOption,
    guarded,
    stderr,
    stdout,
)
from jobs.cli.printing import print_summary
from jobs.cli.progress import AnyProgress, open_progress
from jobs.launchers import LauncherOption, open_launcher
from jobs.running.launcher import Launcher
from jobs.running.manifest import Clock
from jobs.running.run import audit_step, prepare_step, publish_step, score_step
from jobs.running.run_folder import last_audit, load_plan, plan_path, receipts_of
from jobs.running.run_lock import only_run_of
from pipelines.inputs.unchanged import check_model
from pipelines.planning.plan import plan_run
from pipelines.publish import open_table
from pipelines.storage import files
from schemas.config_file import load_config
from schemas.errors import AuditRefusedError, ConfigError
from schemas.gates import AuditReport
from schemas.runs import RunPlan
from schemas.settings import RunConfig

TargetArg = Annotated[
    str, typer.Argument(metavar="CONFIG|RUN_DIR", help="A YAML file, or one run's folder.")
]
RunIdOption = Annotated[
    str | None,
    typer.Option("--run-id", metavar="ID", help="A run of CONFIG's work folder, planned before."),
]


def the_plan(
    target: str,
    run_id: str | None,
    ds: str | None,
    set_: list[str] | None,
    *,
    same_model: bool = True,
) -> RunPlan | RunConfig:
    """The plan of a run folder or of a run id; or a configuration, which is to be planned.

    Args:
        same_model: insist that the model is the one that was planned with.

    Raises:
        ConfigError: --ds or --set say something else than a run that is planned already.
        RunError: its model is another one now.
    """
    if files.exists(plan_path(target)):
        plan = load_plan(target)
        changes = list(set_ or [])
    else:
        config = load_config(target, overrides=set_, ds=ds)
        if run_id is None:
            return config
        plan = load_plan(files.join(config.run.work_dir, run_id))
        changes = _changes(plan, config, set_ or [])
    if ds is not None and ds != plan.ds:
        changes.append(f"--ds {ds}")
    if changes:
        raise ConfigError(
            "--ds and --set cannot change a run that is planned",
            expected=f"what run {plan.run_id} was planned with",
            got=" ".join(changes),
            do="Plan another one with `nightshelf prepare CONFIG`.",
        )
    if same_model:
        _check_release(plan)
        check_model(plan)
    return plan


def _check_release(plan: RunPlan) -> None:
    """A step may not go on with other settings than the run was planned with."""
    if plan.unread:
        raise ConfigError(
            "the run was planned by another release of nightshelf",
            expected="settings that this one knows",
            got=", ".join(plan.unread),
            where=plan.run_dir,
            do="Plan another run with `nightshelf run CONFIG`, or use the release that planned it.",
        )


def _changes(plan: RunPlan, config: RunConfig, set_: list[str]) -> list[str]:
    """Those of the overrides that the run was not planned with. The work folder may be named
    another way: the run was found in it.
    """
    planned, asked = plan.config.model_dump(mode="json"), config.model_dump(mode="json")
    keys = {one: one.partition("=")[0].split(".") for one in set_}
    return [
        one
        for one, key in keys.items()
        if key != ["run", "work_dir"] and _at(planned, key) != _at(asked, key)
    ]


def _at(settings: Any, key: list[str]) -> Any:
    for name in key:
        settings = settings.get(name) if isinstance(settings, dict) else None
    return settings


@contextmanager
def the_run(
    target: str,
    run_id: str | None,
    ds: str | None,
    set_: list[str] | None,
    launcher: str | None,
    *,
    same_model: bool = True,
) -> Iterator[tuple[RunPlan, Launcher]]:
    """`the_plan`, made where it is a configuration, and its launcher until the block ends."""
    found = the_plan(target, run_id, ds, set_, same_model=same_model)
    config = found if isinstance(found, RunConfig) else found.config
    with open_launcher(launcher, config) as chosen:
        plan = plan_run(chosen.locate(found)) if isinstance(found, RunConfig) else found
        yield plan, chosen


@contextmanager
def _run_at_work(
    target: str,
    run_id: str | None,
    ds: str | None,
    set_: list[str] | None,
    launcher: str | None,
    log_format: LogFormat,
) -> Iterator[tuple[RunPlan, Launcher, AnyProgress]]:
    """`the_run`, alone with its partition, and what it tells of its progress."""
    with (
        the_run(target, run_id, ds, set_, launcher) as (plan, chosen),
        only_run_of(plan),
        open_progress(stderr(), log_format) as progress,
    ):
        yield plan, chosen, progress


Step = Callable[[RunPlan, Launcher, AnyProgress, Output], None]


def _command(name: str, step: Step, words: str) -> Callable[..., None]:
    """The command of one step: all of them take a run and say what became of it the same way."""

    def command(
        target: TargetArg,
        run_id: RunIdOption = None,
        ds: DsOption = None,
        set_: SetOption = None,
        launcher: LauncherOption = None,
        log_format: LogFormatOption = LogFormat.text,
        output: OutputOption = Output.text,
    ) -> None:
        with _run_at_work(target, run_id, ds, set_, launcher, log_format) as at_work:
            step(*at_work, output)

    command.__name__, command.__doc__ = name, words
    return guarded(command)


def _print_result(output: Output, **result: object) -> None:
    if output is Output.json:
        typer.echo(json.dumps(result))
    else:
        stdout().print(", ".join(f"{k} {v}" for k, v in result.items()), highlight=False)


def _prepare(plan: RunPlan, launcher: Launcher, progress: AnyProgress, output: Output) -> None:
    prepare_step(plan, launcher, progress)
    about = {"run_id": plan.run_id, "status": "prepared", "shards": plan.num_shards}
    _print_result(output, **about, run_dir=plan.run_dir)


def _score(plan: RunPlan, launcher: Launcher, progress: AnyProgress, output: Output) -> None:
    score_step(plan, launcher, progress, Clock())
    rows = sum(receipt.counts.rows_staged for receipt in receipts_of(plan))
    _print_result(output, run_id=plan.run_id, status="scored", rows=rows, run_dir=plan.run_dir)


def _audit(plan: RunPlan, launcher: Launcher, progress: AnyProgress, output: Output) -> None:
    try:
        _print_audit(audit_step(plan, progress, Clock()), output)
    except AuditRefusedError:
        _print_audit(last_audit(plan), output)
        raise


@guarded
def publish(
    target: TargetArg,
    run_id: RunIdOption = None,
    ds: DsOption = None,
    set_: SetOption = None,
    launcher: LauncherOption = None,
    republish: RepublishOption = False,
    log_format: LogFormatOption = LogFormat.text,
    output: OutputOption = Output.text,
) -> None:
    """Publish a run that its audit let pass."""

    with _run_at_work(target, run_id, ds, set_, launcher, log_format) as (plan, chosen, progress):
        manifest = publish_step(plan, chosen, progress, Clock(), republish=republish)
        print_summary(manifest, output)


@guarded
def audit(
    target: TargetArg,
    run_id: RunIdOption = None,
    ds: DsOption = None,
    set_: SetOption = None,
    launcher: LauncherOption = None,
    published: Annotated[
        bool, typer.Option("--published", help="Hold what readers see to its hashes instead.")
    ] = False,
    log_format: LogFormatOption = LogFormat.text,
    output: OutputOption = Output.text,
) -> None:
    """Apply the audit's gates to a scored run, and show them all.

    Exit 6 when one refuses. With --published: hold the files that readers see to the hashes that
    they were published with; exit 4 when one is not what was published.
    """

    if published:
        found = the_plan(target, run_id, ds, set_, same_model=False)
        config = found if isinstance(found, RunConfig) else found.config
        table = open_table(config, ds=found.ds)
        count, now = table.verify(), table.current()
        about = {"run_id": now.run_id if now else None, "status": "verified"}
        _print_result(output, **about, ds=found.ds, surface=found.surface, files=count)
        return
    with _run_at_work(target, run_id, ds, set_, launcher, log_format) as (plan, chosen, progress):
        _audit(plan, chosen, progress, output)


prepare = _command(
    "prepare", _prepare, "Plan a run and write its shards.\n\nPrints the run's id and folder."
)
score = _command("score", _score, "Score the shards of a prepared run that are not done yet.")


_STYLES = {"refused": "red", "warned": "yellow", "no limit": "dim", "nothing to compare": "dim"}


def _print_audit(report: AuditReport, output: Output) -> None:
    if output is Output.json:
        gates = [{**gate.model_dump(mode="json"), "verdict": gate.verdict} for gate in report.gates]
        status = "refused" if report.refused else "passed"
        typer.echo(json.dumps({"run_id": report.run_id, "status": status, "gates": gates}))
        return
    table = Table(title=f"audit of run {report.run_id}", title_justify="left")
    for column in ("gate", "value", "allowed", "", "what"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for gate in report.gates:
        verdict = gate.verdict
        value = "-" if gate.value is None else f"{gate.value:,.4g}"
        style = _STYLES.get(verdict)
        table.add_row(gate.gate, value, gate.allowed, verdict, gate.detail, style=style)
    stdout().print(table)

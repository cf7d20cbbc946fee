"""The command line. Results on stdout, progress on stderr; `--output json` ends with one JSON line.

Exit codes: 0 published · 2 usage or configuration · 3 an input breaks its contract · 4 some shards
failed, running again is safe · 5 the engine cannot start · 6 the audit refused, or `compare` found
too much · 130 interrupted · 143 asked to end (SIGTERM).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from jobs.cli.bench import BENCH_CONTEXT, bench
from jobs.cli.catalog import catalog
from jobs.cli.doctor import doctor
from jobs.cli.evaluate import compare, evaluate
from jobs.cli.help_pages import PlainCommand, Root, examples
from jobs.cli.init import init
from jobs.cli.options import (
    ConfigArg,
    DsOption,
    LogFormat,
    LogFormatOption,
    Output,
    OutputOption,
    RepublishOption,
    SetOption,
    guarded,
    stderr,
)
from jobs.cli.printing import print_plan, print_runs, print_summary, print_user
from jobs.cli.progress import open_progress
from jobs.cli.publish import rollback, unpublish
from jobs.cli.report import report
from jobs.cli.steps import audit, prepare, publish, score
from jobs.cli.upkeep import backfill, export, gc
from jobs.cli.validate import validate
from jobs.launchers import LauncherOption, open_launcher
from jobs.running.run import run_job
from jobs.running.run_folder import plan_path
from jobs.upkeep.run_states import all_runs, run_status
from jobs.upkeep.show import show_user
from pipelines.planning.plan import plan_run
from pipelines.storage import files
from schemas.config_file import load_config
from schemas.settings import json_schema

_EPILOG = (
    "Exit codes: 0 published · 2 usage or configuration · 3 an input breaks its contract · "
    "4 some shards failed, running again is safe · 5 the engine cannot start · 6 the audit refused "
    "· 130 interrupted · 143 asked to end by SIGTERM"
    "\n\n"
    "Start with `nightshelf init`, which writes a configuration for your tables; then "
    "`nightshelf plan my.yaml` and `nightshelf run my.yaml`."
)

app = typer.Typer(
    name="nightshelf",
    help="Precompute recommendations in batch: multi-item scoring and semantic-ID beam search on a "
    "generative recommender, from tables to tables.",
    no_args_is_help=True,
    epilog=_EPILOG,
    cls=Root,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nightshelf {version('nightshelf')}")
        raise typer.Exit


@app.callback()
def _top(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@guarded
def run(
    config: ConfigArg,
    ds: DsOption = None,
    set_: SetOption = None,
    launcher: LauncherOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan only; score nothing.")] = False,
    republish: RepublishOption = False,
    log_format: LogFormatOption = LogFormat.text,
    output: OutputOption = Output.text,
) -> None:
    """Plan, score, audit, publish and report one run.

    Running it again continues it.
    """

    settings = load_config(config, overrides=set_, ds=ds)
    with open_launcher(launcher, settings) as chosen:
        if dry_run:
            print_plan(plan_run(chosen.locate(settings)), output)
            return
        with open_progress(stderr(), log_format) as progress:
            manifest = run_job(settings, chosen, progress, republish=republish)
    print_summary(manifest, output)


@guarded
def plan(
    config: ConfigArg,
    ds: DsOption = None,
    set_: SetOption = None,
    launcher: LauncherOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Check configuration and inputs, and say what a run would do."""

    settings = load_config(config, overrides=set_, ds=ds)
    with open_launcher(launcher, settings) as chosen:
        print_plan(plan_run(chosen.locate(settings)), output)


@guarded
def status(
    target: Annotated[
        str, typer.Argument(metavar="CONFIG|RUN_DIR", help="A YAML file, or one run's folder.")
    ],
    set_: SetOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Show the runs of a work folder, or one run."""

    if files.exists(plan_path(target)):
        runs = [run_status(target)]
    else:
        runs = all_runs(load_config(target, overrides=set_).run.work_dir)
    print_runs(runs, output)


@guarded
def show(
    config: ConfigArg,
    user: Annotated[str, typer.Option("--user", metavar="ID", help="Whose recommendations.")],
    ds: DsOption = None,
    set_: SetOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Show what is published for one user, with titles."""

    settings = load_config(config, overrides=set_, ds=ds)
    print_user(show_user(settings, user), settings, output)


def schema() -> None:
    """Print the JSON Schema of a configuration, for editors."""
    typer.echo(json.dumps(json_schema(), indent=1))


# Panel -> its commands, in the order of the page; with each, what a person types first.
_PANELS: dict[str, dict[Callable[..., None], tuple[str, ...]]] = {
    "Set up and check": {
        init: ("init --users users.parquet --catalog catalog.parquet --model checkpoints/onerec",),
        doctor: ("doctor",),
        validate: ("validate my.yaml",),
        schema: ("schema > nightshelf.schema.json",),
    },
    "Run": {
        run: (
            "run my.yaml --ds 2026-11-28",
            "run my.yaml --set task.k=50 --set run.workers=4",
            "run my.yaml --output json | tail -1 | jq .report",
        ),
        plan: ("plan my.yaml --ds 2026-11-28",),
        backfill: ("backfill my.yaml --from 2026-11-01 --to 2026-11-28 --max-active 2",),
        status: ("status my.yaml", "status runs/2026-11-28-home-0d6c1f3a52b7"),
    },
    "Look and judge": {
        report: (
            "report my.yaml --ds 2026-11-28",
            "report runs/2026-11-28-home-0d6c1f3a52b7 --user U1 --user U2",
        ),
        show: ("show my.yaml --ds 2026-11-28 --user U1",),
        evaluate: ("evaluate my.yaml --truth clicks.parquet",),
        compare: ("compare runs/RUN_A runs/RUN_B",),
    },
    "Steps of a run, one by one": {
        prepare: ("prepare my.yaml --ds 2026-11-28 --output json",),
        score: ("score my.yaml --run-id 2026-11-28-home-0d6c1f3a52b7",),
        audit: (
            "audit runs/2026-11-28-home-0d6c1f3a52b7",
            "audit my.yaml --ds 2026-11-28 --published",
        ),
        publish: ("publish runs/2026-11-28-home-0d6c1f3a52b7",),
    },
    "Published tables": {
        rollback: (
            "rollback my.yaml --ds 2026-11-28",
            "rollback my.yaml --ds 2026-11-28 --serve-from 2026-11-27",
        ),
        unpublish: ("unpublish my.yaml --ds 2026-11-28",),
        export: ("export my.yaml --ds 2026-11-28 --to shelves/ --format arrow",),
        gc: ("gc my.yaml --dry-run", "gc my.yaml --keep 2 --keep-days 14"),
    },
}
for _panel, _commands in _PANELS.items():
    for _command, _lines in _commands.items():
        app.command(rich_help_panel=_panel, epilog=examples(_lines), cls=PlainCommand)(_command)
app.command(rich_help_panel="More", context_settings=BENCH_CONTEXT, cls=PlainCommand)(bench)
app.add_typer(catalog, name="catalog", rich_help_panel="Set up and check")


def main() -> NoReturn:
    """Entry point of the `nightshelf` command."""
    app(prog_name="nightshelf")
    raise AssertionError("typer leaves by SystemExit")

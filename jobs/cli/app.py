"""The command line. Results on stdout, progress on stderr; `--output json` ends with one JSON line.

Exit codes: 0 published · 2 usage or configuration · 3 an input breaks its contract · 4 some shards
failed, running again is safe · 5 the engine cannot start · 6 the audit refused, or `compare` found
too much · 130 interrupted · 143 asked to end (SIGTERM).
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from jobs.cli.bench import BENCH_CONTEXT, bench
from jobs.cli.catalog import catalog
from jobs.cli.doctor import doctor
from jobs.cli.evaluate import judge
from jobs.cli.help_pages import arrange
from jobs.cli.init import init
from jobs.cli.options import (
    ConfigArg,
    DebugOption,
    DsOption,
    LogFormat,
    LogFormatOption,
    Output,
    OutputOption,
    RepublishOption,
    SetOption,
    guard,
    stderr,
)
from jobs.cli.printing import print_plan, print_runs, print_summary, print_user
from jobs.cli.progress import open_progress
from jobs.cli.publish import rollback, unpublish
from jobs.cli.report import report
from jobs.cli.steps import steps
from jobs.cli.upkeep import upkeep
from jobs.cli.validate import validate
from jobs.launchers import LauncherOption, open_launcher
from jobs.running.run import plan_path, run_job
from jobs.upkeep.run_states import all_runs, run_status, show_user
from pipelines.planning.plan import plan_run
from pipelines.storage import files
from schemas.config_file import load_config
from schemas.settings import json_schema

app = typer.Typer(
    name="nightshelf",
    help="Precompute recommendations in batch: multi-item scoring and semantic-ID beam search on a "
    "generative recommender, from tables to tables.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(catalog, name="catalog")


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


@app.command()
def run(
    config: ConfigArg,
    ds: DsOption = None,
    set_: SetOption = None,
    launcher: LauncherOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan only; score nothing.")] = False,
    republish: RepublishOption = False,
    log_format: LogFormatOption = LogFormat.text,
    output: OutputOption = Output.text,
    debug: DebugOption = False,
) -> None:
    """Plan, score, audit, publish and report one run.

    Running it again continues it.
    """

    def body() -> None:
        settings = load_config(config, overrides=set_, ds=ds)
        with open_launcher(launcher, settings) as chosen:
            if dry_run:
                print_plan(plan_run(chosen.locate(settings)), output)
                return
            with open_progress(stderr(), log_format) as progress:
                manifest = run_job(settings, chosen, progress, republish=republish)
        print_summary(manifest, output)

    guard(body, output, debug, log_format)


@app.command()
def plan(
    config: ConfigArg,
    ds: DsOption = None,
    set_: SetOption = None,
    launcher: LauncherOption = None,
    output: OutputOption = Output.text,
    debug: DebugOption = False,
) -> None:
    """Check configuration and inputs, and say what a run would do."""

    def body() -> None:
        settings = load_config(config, overrides=set_, ds=ds)
        with open_launcher(launcher, settings) as chosen:
            print_plan(plan_run(chosen.locate(settings)), output)

    guard(body, output, debug)


@app.command()
def status(
    target: Annotated[
        str, typer.Argument(metavar="CONFIG|RUN_DIR", help="A YAML file, or one run's folder.")
    ],
    set_: SetOption = None,
    output: OutputOption = Output.text,
    debug: DebugOption = False,
) -> None:
    """Show the runs of a work folder, or one run."""

    def body() -> None:
        if files.exists(plan_path(target)):
            runs = [run_status(target)]
        else:
            runs = all_runs(load_config(target, overrides=set_).run.work_dir)
        print_runs(runs, output)

    guard(body, output, debug)


@app.command()
def show(
    config: ConfigArg,
    user: Annotated[str, typer.Option("--user", metavar="ID", help="Whose recommendations.")],
    ds: DsOption = None,
    set_: SetOption = None,
    output: OutputOption = Output.text,
    debug: DebugOption = False,
) -> None:
    """Show what is published for one user, with titles."""

    def body() -> None:
        settings = load_config(config, overrides=set_, ds=ds)
        print_user(show_user(settings, user), settings, output)

    guard(body, output, debug)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a configuration, for editors."""
    typer.echo(json.dumps(json_schema(), indent=1))


app.registered_commands += steps.registered_commands
app.registered_commands += upkeep.registered_commands
app.registered_commands += judge.registered_commands
app.command()(report)
app.command()(rollback)
app.command()(unpublish)
app.command()(init)
app.command()(validate)
app.command()(doctor)
app.command(context_settings=BENCH_CONTEXT)(bench)
arrange(app)


def main() -> NoReturn:
    """Entry point of the `nightshelf` command."""
    app(prog_name="nightshelf")
    raise AssertionError("typer leaves by SystemExit")

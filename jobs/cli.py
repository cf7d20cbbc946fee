"""The command line. Results on stdout, progress on stderr; `--output json` ends with one JSON line.

Exit codes: 0 published · 2 usage or configuration · 3 an input breaks its contract · 4 some shards
failed, running again is safe · 5 the engine cannot start · 6 the audit refused · 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from jobs.inspect import RunStatus, UserView, all_runs, run_status, show_user
from jobs.launch_local import LocalLauncher
from jobs.progress import open_progress
from jobs.run import plan_path, run_job
from pipelines import files
from pipelines.plan import plan_run
from pipelines.prepare import shards_of
from pipelines.run_shard import load_receipt
from schemas.errors import NightshelfError
from schemas.runs import RunManifest, RunPlan
from schemas.settings import RunConfig, json_schema, load_config

app = typer.Typer(
    name="nightshelf",
    help="Precompute recommendations in batch: multi-item scoring and semantic-ID beam search on a "
    "generative recommender, from tables to tables.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


class Output(StrEnum):
    """Form of the result on stdout."""

    text = "text"
    json = "json"


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
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the stack trace of an error.")]


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan only; score nothing.")] = False,
    output: OutputOption = Output.text,
    debug: DebugOption = False,
) -> None:
    """Plan, prepare, score, audit and publish one run. Running it again continues it."""

    def body() -> None:
        settings = load_config(config, overrides=set_, ds=ds)
        if dry_run:
            _print_plan(plan_run(settings), output)
            return
        with open_progress(_stderr()) as progress:
            manifest = run_job(settings, LocalLauncher(), progress)
        _print_summary(manifest, output)

    _guard(body, output, debug)


@app.command()
def plan(
    config: ConfigArg,
    ds: DsOption = None,
    set_: SetOption = None,
    output: OutputOption = Output.text,
    debug: DebugOption = False,
) -> None:
    """Check the configuration and the inputs, and say what a run would do."""

    def body() -> None:
        _print_plan(plan_run(load_config(config, overrides=set_, ds=ds)), output)

    _guard(body, output, debug)


@app.command()
def status(
    target: Annotated[
        str, typer.Argument(metavar="CONFIG|RUN_DIR", help="A YAML file, or one run's folder.")
    ],
    set_: SetOption = None,
    output: OutputOption = Output.text,
    debug: DebugOption = False,
) -> None:
    """Show the runs of a configuration's work folder, or one run."""

    def body() -> None:
        if files.exists(plan_path(target)):
            runs = [run_status(target)]
        else:
            runs = all_runs(load_config(target, overrides=set_).run.work_dir)
        _print_runs(runs, output)

    _guard(body, output, debug)


@app.command()
def show(
    config: ConfigArg,
    user: Annotated[str, typer.Option("--user", metavar="ID", help="Whose recommendations.")],
    ds: DsOption = None,
    set_: SetOption = None,
    output: OutputOption = Output.text,
    debug: DebugOption = False,
) -> None:
    """Show what is published for one user, with the catalog's titles."""

    def body() -> None:
        settings = load_config(config, overrides=set_, ds=ds)
        _print_user(show_user(settings, user), settings, output)

    _guard(body, output, debug)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a configuration, for editors."""
    typer.echo(json.dumps(json_schema(), indent=1))


def main() -> NoReturn:
    """Entry point of the `nightshelf` command."""
    app(prog_name="nightshelf")
    raise AssertionError("typer leaves by SystemExit")


def _stderr() -> Console:
    return Console(stderr=True)


def _stdout() -> Console:
    # A table that is piped keeps its width; a terminal decides for itself.
    return Console() if sys.stdout.isatty() else Console(width=int(os.environ.get("COLUMNS", 110)))


def _guard(body: Callable[[], None], output: Output, debug: bool) -> None:
    """Run a command; turn what goes wrong into a message and an exit code."""
    try:
        body()
    except NightshelfError as err:
        if debug:
            traceback.print_exc()
        _leave(output, str(err), err.exit_code, err.as_json())
    except KeyboardInterrupt:
        message = "interrupted; run the same command again to continue"
        _leave(output, message, 130, {"kind": "interrupted", "exit_code": 130, "message": message})
    except Exception as err:
        if debug:
            traceback.print_exc()
        message = f"unexpected {type(err).__name__}: {err}. Run with --debug for the stack trace"
        _leave(output, message, 1, {"kind": "unexpected", "exit_code": 1, "message": message})


def _leave(output: Output, message: str, code: int, error: dict[str, Any]) -> NoReturn:
    typer.echo(f"nightshelf: {message}", err=True)
    if output is Output.json:
        typer.echo(json.dumps({"status": "failed", "error": error}))
    raise typer.Exit(code)


def _print_summary(manifest: RunManifest, output: Output) -> None:
    summary = manifest.summary()
    if output is Output.json:
        typer.echo(json.dumps(summary))
        return
    console = _stdout()
    table = Table(title=f"run {summary['run_id']}", title_justify="left", show_header=False)
    for label, value in (
        ("status", summary["status"]),
        ("users in", f"{summary['users_in']:,}"),
        ("  recommended", f"{summary['users_recommended']:,}"),
        ("  quarantined", f"{summary['users_quarantined']:,}"),
        ("  nothing eligible", f"{summary['users_without_eligible']:,}"),
        ("rows published", f"{summary['rows_published']:,}"),
        ("exact lists", _percent(summary["exact_share"])),
        (
            "rows forwarded",
            f"{summary['rows_forwarded']:,} (one by one: {summary['rows_naive']:,})",
        ),
        ("time", f"{summary['seconds']:.1f} s, {summary['users_per_s']:,.0f} users/s"),
        ("table", summary["published"]),
        ("run folder", summary["run_dir"]),
    ):
        table.add_row(label, str(value))
    console.print(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _print_plan(plan: RunPlan, output: Output) -> None:
    done = sum(load_receipt(plan, shard) is not None for shard in shards_of(plan))
    if output is Output.json:
        inputs = {
            name: {"files": len(t.files), "rows": t.rows, "bytes": sum(f.bytes for f in t.files)}
            for name, t in plan.inputs.items()
        }
        found = {
            "run_id": plan.run_id,
            "status": "planned",
            "ds": plan.ds,
            "surface": plan.surface,
            "shards": plan.num_shards,
            "shards_done": done,
            "inputs": inputs,
            "hashes": plan.hashes,
            "run_dir": plan.run_dir,
        }
        typer.echo(json.dumps(found))
        return
    table = Table(title=f"plan of run {plan.run_id}", title_justify="left")
    for column, justify in (
        ("table", "left"),
        ("files", "right"),
        ("rows", "right"),
        ("MB", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for name, found_table in plan.inputs.items():
        size = sum(file.bytes for file in found_table.files) / 1e6
        table.add_row(name, f"{len(found_table.files)}", f"{found_table.rows:,}", f"{size:.1f}")
    console = _stdout()
    console.print(table)
    console.print(
        f"{plan.num_shards} shards, {done} of them done; publishes to {plan.config.output.path}",
        highlight=False,
    )


def _print_runs(runs: list[RunStatus], output: Output) -> None:
    if output is Output.json:
        found = [
            {
                "run_id": r.run_id,
                "status": r.status,
                "ds": r.ds,
                "surface": r.surface,
                "shards_done": r.shards_done,
                "shards": r.shards,
                "run_dir": r.run_dir,
                **r.counts.model_dump(),
            }
            for r in runs
        ]
        typer.echo(json.dumps({"runs": found}))
        return
    if not runs:
        typer.echo("no runs yet")
        return
    table = Table()
    for column in ("run", "status", "shards", "recommended", "quarantined", "rows", "seconds"):
        table.add_column(column, justify="left" if column in ("run", "status") else "right")
    for r in runs:
        c = r.counts
        table.add_row(
            r.run_id,
            r.status,
            f"{r.shards_done}/{r.shards}",
            f"{c.users_recommended:,}",
            f"{c.users_quarantined:,}",
            f"{c.rows_staged:,}",
            "-" if r.seconds is None else f"{r.seconds:.1f}",
        )
    _stdout().print(table)


def _print_user(view: UserView, config: RunConfig, output: Output) -> None:
    if output is Output.json:
        found = {
            "user": view.user,
            "ds": config.ds,
            "surface": config.surface,
            "run_id": view.run_id,
            "exact": view.exact,
            "why_not": view.why_not,
            "items": view.rows,
        }
        typer.echo(json.dumps(found))
        return
    if view.why_not is not None:
        typer.echo(f"user {view.user} has no recommendations: {view.why_not}")
        return
    exact = "proven exact" if view.exact else "not proven exact"
    table = Table(
        title=f"user {view.user} · {config.surface} · {config.ds} · {exact}", title_justify="left"
    )
    for column in ("rank", "item", "title", "score", "source"):
        table.add_column(column, justify="right" if column in ("rank", "score") else "left")
    for row in view.rows:
        table.add_row(
            str(row["rank"]),
            str(row["item_id"]),
            row["title"],
            f"{row['score']:.3f}",
            row["source"],
        )
    _stdout().print(table)


import jobs.catalog_cli  # noqa: E402, F401 - adds `catalog` to the app

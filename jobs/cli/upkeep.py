"""Commands around runs: `backfill`, `gc` and `export`."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table

from jobs.cli.options import (
    ConfigArg,
    DsOption,
    Output,
    OutputOption,
    SetOption,
    guarded,
    place_option,
    stderr,
    stdout,
)
from jobs.launchers import LauncherOption
from jobs.upkeep.backfill import BackfillOptions, Day, Reprocess, days_between
from jobs.upkeep.backfill import backfill as run_backfill
from jobs.upkeep.gc import clean_up
from pipelines.publish.export import export_partition
from schemas.config_file import load_config
from schemas.errors import RunError


class ExportForm(StrEnum):
    """Form of an export's files."""

    jsonl = "jsonl"
    arrow = "arrow"


@guarded
def backfill(
    config: ConfigArg,
    first: Annotated[str, typer.Option("--from", metavar="YYYY-MM-DD", help="First date.")],
    last: Annotated[str, typer.Option("--to", metavar="YYYY-MM-DD", help="Last date.")],
    reprocess: Annotated[
        Reprocess,
        typer.Option(help="Days to run again: none that has a run, those not published, or all."),
    ] = Reprocess.none,
    max_active: Annotated[int, typer.Option(min=1, help="Days at once.")] = 1,
    backwards: Annotated[bool, typer.Option("--backwards", help="Latest day first.")] = False,
    launcher: LauncherOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would run.")] = False,
    set_: SetOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Run every day of a range.

    Exit 4 when any of them failed; the others are published.
    """

    progress = stderr()
    days = run_backfill(
        config,
        days_between(first, last, backwards=backwards),
        BackfillOptions(
            overrides=set_ or [],
            reprocess=reprocess,
            max_active=max_active,
            dry_run=dry_run,
            launcher=launcher,
        ),
        done=lambda day: progress.print(f"{day.ds} {day.state}", highlight=False),
    )
    _print_days(days, output)
    failed = [day.ds for day in days if day.state == "failed"]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(days)} days failed",
            got=", ".join(failed),
            do="Repair what they say and run again with --reprocess failed.",
        )


def _print_days(days: list[Day], output: Output) -> None:
    if output is Output.json:
        typer.echo(json.dumps({"days": [asdict(day) for day in days]}))
        return
    table = Table()
    for column in ("day", "before", "state", "exit", "rows", "run, or what went wrong"):
        table.add_column(column, justify="right" if column in ("exit", "rows") else "left")
    for day in days:
        code = "-" if day.exit_code is None else str(day.exit_code)
        rows = "-" if day.rows is None else f"{day.rows:,}"
        style = "red" if day.state == "failed" else None
        table.add_row(day.ds, day.before, day.state, code, rows, day.message, style=style)
    stdout().print(table)


@guarded
def gc(
    config: ConfigArg,
    keep: Annotated[
        int, typer.Option(min=0, help="Earlier published runs of a partition to keep rows of.")
    ] = 1,
    keep_days: Annotated[
        float | None,
        typer.Option(
            "--keep-days",
            "--older-than-days",
            min=0,
            help="Leave runs alone that wrote anything since; default: run.keep_days.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    set_: SetOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Remove files that no run needs any more.

    Never a published table.
    """

    run = load_config(config, overrides=set_).run
    days = run.keep_days if keep_days is None else keep_days
    removed = clean_up(run.work_dir, keep=keep, older_than_days=days, dry_run=dry_run)
    if output is Output.json:
        runs = [asdict(one) for one in removed]
        typer.echo(json.dumps({"dry_run": dry_run, "removed": runs}))
        return
    table = Table(title="would be removed" if dry_run else "removed", title_justify="left")
    for column in ("run", "status", "MB"):
        table.add_column(column, justify="right" if column == "MB" else "left")
    for one in removed:
        table.add_row(one.run_id, one.status, f"{one.bytes / 1e6:.1f}")
    table.add_row("in all", "", f"{sum(one.bytes for one in removed) / 1e6:.1f}")
    stdout().print(table)


@guarded
def export(
    config: ConfigArg,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="FOLDER", callback=place_option, help="A new folder, or a URL."
        ),
    ],
    ds: DsOption = None,
    num_files: Annotated[int, typer.Option("--files", min=1, help="Files to spread over.")] = 16,
    form: Annotated[
        ExportForm, typer.Option("--format", help="Lines of JSON, or Arrow streams.")
    ] = (ExportForm.jsonl),
    set_: SetOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Write what is published as one record per user.

    For the bulk loader of a serving store.
    """

    settings = load_config(config, overrides=set_, ds=ds)
    counts = export_partition(settings, to, num_files=num_files, form=form.value)
    if output is Output.json:
        typer.echo(json.dumps({"to": to, "files": counts}))
    else:
        typer.echo(f"{sum(counts.values()):,} users in {len(counts)} files below {to}")

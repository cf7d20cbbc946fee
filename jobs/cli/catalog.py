"""`nightshelf catalog`: look a catalog over, and see what its trie is like, before a run.

`check` exits 0 when nothing is wrong and 3 otherwise.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jobs.cli.help_pages import PlainCommand, PlainGroup
from jobs.cli.options import (
    ConfigArg,
    DsOption,
    Output,
    OutputOption,
    SetOption,
    guarded,
    stdout,
)
from jobs.cli.printing import percent
from pipelines.catalog.check import CatalogFacts, CatalogReport, check_catalog
from pipelines.catalog.stats import CatalogStats, catalog_stats
from schemas.config_file import load_config
from schemas.errors import InputError

catalog = typer.Typer(
    help="Check a catalog, or measure it, before a run.", no_args_is_help=True, cls=PlainGroup
)


@catalog.command(cls=PlainCommand)
@guarded
def check(
    config: ConfigArg,
    ds: DsOption = None,
    set_: SetOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Report every problem of a catalog at once.

    Its items, its SID tokens, and the model's vocabulary.
    """
    report = check_catalog(load_config(config, overrides=set_, ds=ds))
    _print_report(report, output)
    if report.problems:
        raise typer.Exit(InputError.exit_code)


@catalog.command(cls=PlainCommand)
@guarded
def stats(
    config: ConfigArg,
    ds: DsOption = None,
    set_: SetOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Measure a catalog: collisions, branching, rows forwarded."""
    _print_stats(catalog_stats(load_config(config, overrides=set_, ds=ds)), output)


def _print_report(report: CatalogReport, output: Output) -> None:
    if output is Output.json:
        facts = asdict(report.catalog) if report.catalog else {}
        facts["vocabulary"] = asdict(report.vocabulary) if report.vocabulary else None
        typer.echo(json.dumps({"problems": [asdict(p) for p in report.problems], "facts": facts}))
        return
    console = stdout()
    _print_problems(report, console)
    table = Table(title="facts", title_justify="left", show_header=False)
    if report.catalog is not None:
        _add_facts(table, report.catalog)
    if report.vocabulary is not None:
        for label, value in asdict(report.vocabulary).items():
            table.add_row(f"vocabulary, {label}", "-" if value is None else f"{value:,}")
    if table.row_count:
        console.print(table)


def _print_problems(report: CatalogReport, console: Console) -> None:
    if not report.problems:
        console.print("no problems")
        return
    count = len(report.problems)
    title = f"{count} problem{'' if count == 1 else 's'}"
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("rule")
    table.add_column("count", justify="right")
    table.add_column("what, and examples", overflow="fold")
    for problem in report.problems:
        text = "\n".join([problem.message, *(f"- {example}" for example in problem.examples)])
        table.add_row(problem.rule, f"{problem.count:,}", escape(text))
    console.print(table)


def _add_facts(table: Table, facts: CatalogFacts) -> None:
    named = facts.largest_group_items
    largest = f"{facts.largest_group_sid} names {facts.largest_group:,}: {', '.join(named)}"
    more = facts.largest_group - len(named)
    lengths = (f"{length} levels {count:,}" for length, count in facts.sids_by_length.items())
    for label, value in (
        ("rows", f"{facts.rows:,}"),
        ("usable items", f"{facts.items:,}"),
        ("distinct SIDs", f"{facts.distinct_sids:,} ({', '.join(lengths)})"),
        ("shared SIDs", f"{facts.shared_sids:,}, by {facts.items_sharing:,} items"),
        ("largest group", largest + (f" and {more:,} more" if more > 0 else "")),
    ):
        table.add_row(label, escape(value))
    for level in facts.levels:
        table.add_row(f"level {level.level}", f"{level.used:,} of {level.available:,} codes used")


def _print_stats(stats: CatalogStats, output: Output) -> None:
    if output is Output.json:
        typer.echo(json.dumps(asdict(stats)))
        return
    console = stdout()
    table = Table(title="catalog", title_justify="left", show_header=False)
    for label, value in (
        ("items", f"{stats.items:,}"),
        ("distinct SIDs", f"{stats.sids:,}"),
        ("shared SIDs", f"{stats.shared_sids:,}, largest of {stats.largest_group:,} items"),
        ("first-level children", f"{stats.first_level_children:,}"),
        ("forced last token", f"{percent(stats.forced_last_share)} of SIDs"),
        ("trie", f"{stats.trie_bytes / 1e6:,.1f} MB"),
    ):
        table.add_row(label, value)
    console.print(table)
    _print_levels(stats, console)
    _print_packing(stats, console)


def _print_levels(stats: CatalogStats, console: Console) -> None:
    table = Table(title="levels", title_justify="left")
    for column in ("level", "codes", "nodes", "children min", "mean", "max", "forced"):
        table.add_column(column, justify="right")
    for level in stats.levels:
        mean = None if level.children_mean is None else f"{level.children_mean:,.1f}"
        children = (level.children_min, mean, level.children_max)
        table.add_row(
            str(level.level),
            f"{level.available:,}",
            f"{level.nodes:,}",
            *("-" if value is None else str(value) for value in children),
            percent(level.forced_share),
        )
    console.print(table)


def _print_packing(stats: CatalogStats, console: Console) -> None:
    table = Table(title="rows forwarded per user, random candidates", title_justify="left")
    for column in ("candidates", "token tree", "one row per token", "without the last"):
        table.add_column(column, justify="right")
    for packing in stats.packing:
        rows = (packing.rows_forwarded, packing.rows_per_token, packing.rows_without_last)
        table.add_row(f"{packing.candidates:,}", *(f"{value:,.0f}" for value in rows))
    console.print(table)

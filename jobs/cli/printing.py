"""Results for people and for machines: a table, or one JSON line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import typer
from rich.style import Style
from rich.table import Table
from rich.text import Text

from jobs.cli.options import Output, stdout
from jobs.upkeep.backfill import day_states
from jobs.upkeep.run_states import RunStatus
from jobs.upkeep.show import UserView
from pipelines.inputs.prepared import shards_of
from pipelines.planning.estimate import Estimate, estimate, table_bytes
from pipelines.shards.run_shard import load_receipt
from schemas.runs import RunManifest, RunPlan
from schemas.settings import RunConfig


def print_summary(manifest: RunManifest, output: Output) -> None:
    """The summary of a run."""
    summary = manifest.summary()
    if output is Output.json:
        typer.echo(json.dumps(summary))
        return
    got = ("  recommended", f"{summary['users_recommended']:,}")
    if "users_embedded" in summary:
        got = ("  embedded", f"{summary['users_embedded']:,}")
    console = stdout()
    table = Table(title=f"run {summary['run_id']}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a path that is cut short is of no use
    for label, value in (
        ("status", summary["status"]),
        ("users in", f"{summary['users_in']:,}"),
        got,
        ("  quarantined", f"{summary['users_quarantined']:,}"),
        ("  nothing eligible", f"{summary['users_without_eligible']:,}"),
        ("rows published", _rows(summary)),
        ("exact lists", percent(summary["exact_share"])),
        ("search", _search(summary)),
        ("beam widths", _widths(summary["beam_widths"])),
        ("legal mass", _number(summary["legal_mass"])),
        ("distinct lists", percent(summary["distinct_lists"])),
        ("history", _history(summary)),
        (
            "rows forwarded",
            f"{summary['rows_forwarded']:,} (one by one: {summary['rows_naive']:,})",
        ),
        ("cost", _cost(summary)),
        ("time", f"{summary['seconds']:.1f} s, {summary['users_per_s']:,.0f} users/s"),
        ("table", summary["published"]),
        ("run folder", summary["run_dir"]),
        ("report", _link(summary["report"])),
    ):
        table.add_row(label, value if isinstance(value, Text) else str(value))
    console.print(table)


_LOUD = 0.2  # change of the number of rows that nobody should miss


def _rows(summary: dict[str, Any]) -> Text:
    """The rows, and loudly how far they are from those of the run before."""
    text = Text(f"{summary['rows_published']:,}")
    change = summary["row_change"]
    if change is not None and change >= _LOUD:
        words = f"  {100 * change:.0f} % more or fewer than the run before: is the input whole?"
        text.append(words, style="bold red")
    return text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _history(summary: dict[str, Any]) -> str:
    """How much of the histories the catalog knows, and how much of them is recommended again."""
    if summary["unknown_history_share"] is None:
        return "-"
    unknown, again = summary["unknown_history_items"], summary["history_rows_share"]
    words = f"{unknown:,} items not in the catalog ({percent(summary['unknown_history_share'])})"
    return words if again is None else f"{words}; {percent(again)} of rows are in it"


def _link(report: str | None) -> Text:
    """The page, to be clicked where the terminal can."""
    if report is None:
        return Text("not written")
    url = report if "://" in report else Path(report).absolute().as_uri()
    return Text(report, style=Style(link=url))


def _cost(summary: dict[str, Any]) -> str:
    hours = f"{summary['device_hours']:.3f} device hours"
    if summary["cost"] is None:
        return f"{hours}; set run.price_per_hour for a price"
    per_million = summary["cost_per_million_users"]
    return f"{summary['cost']:,.2f} for {hours}; {per_million:,.2f} per million users"


def _search(summary: dict[str, Any]) -> str:
    """How far the searches went, and how many ran into their budget."""
    if summary["nodes_per_user"] is None:
        return "-"
    nodes, rounds = summary["nodes_per_user"], summary["rounds_per_user"]
    stopped = percent(summary["stopped_share"])
    return f"{nodes:.1f} prefixes in {rounds:.1f} rounds per user; {stopped} ended as beams"


def _widths(widths: dict[int, int] | None) -> str:
    """How many users were searched with which beam."""
    if not widths:
        return "-"
    return ", ".join(f"{width} ({users:,} users)" for width, users in widths.items())


def percent(share: float | None) -> str:
    """A share in percent, or a dash."""
    return "-" if share is None else f"{100 * share:.1f} %"


def print_plan(plan: RunPlan, output: Output) -> None:
    """What a run would do."""
    receipts = (load_receipt(plan, shard, prove=False) for shard in shards_of(plan))
    done = sum(receipt is not None for receipt in receipts)
    if output is Output.json:
        inputs = {
            name: {"files": len(t.files), "rows": t.rows, "bytes": table_bytes(t)}
            for name, t in plan.inputs.items()
        }
        found = {
            "run_id": plan.run_id,
            "status": "planned",
            "before": day_states(plan.config, plan.ds).get(plan.ds, "none"),
            "ds": plan.ds,
            "surface": plan.surface,
            "shards": plan.num_shards,
            "shards_done": done,
            "inputs": inputs,
            "estimate": estimate(plan).model_dump(),
            "hashes": plan.hashes,
            "run_dir": plan.run_dir,
        }
        typer.echo(json.dumps(found))
        return
    table = Table(title=f"plan of run {plan.run_id}", title_justify="left")
    for column in ("table", "files", "rows", "MB"):
        table.add_column(column, justify="left" if column == "table" else "right")
    for name, found_table in plan.inputs.items():
        size = table_bytes(found_table) / 1e6
        table.add_row(name, f"{len(found_table.files)}", f"{found_table.rows:,}", f"{size:.1f}")
    console = stdout()
    console.print(table)
    console.print(
        f"{plan.num_shards} shards, {done} of them done; publishes to {plan.config.output.path}",
        highlight=False,
    )
    for line in _estimate_lines(estimate(plan)):
        console.print(line, highlight=False)


def _estimate_lines(found: Estimate) -> list[str]:
    lines = [
        f"about {found.prompt_tokens:,} prompt tokens, {found.candidates:,} candidates, at most "
        f"{found.rows_forwarded:,} rows through the model"
    ]
    if found.model_bytes is not None and found.pack_bytes is not None:
        lines.append(
            f"memory of the device: weights {found.model_bytes / 1e9:.2f} GB, keys and values of a "
            f"pack {found.pack_bytes / 1e9:.2f} GB"
        )
    if found.device_hours is None:
        lines.append(f"time: not known, {found.basis}")
    else:
        cost = "" if found.cost is None else f", cost {found.cost:,.2f}"
        lines.append(f"time: {found.device_hours:,.3f} device hours{cost}, by {found.basis}")
    return lines


def print_runs(runs: list[RunStatus], output: Output) -> None:
    """How far runs are."""
    if output is Output.json:
        found = [
            {
                "run_id": r.run_id,
                "status": r.status,
                "serves": list(r.serves),
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
    table.add_column("run", no_wrap=True, min_width=max(len(r.run_id) for r in runs))
    for column in ("status", "shards", "recommended", "quarantined", "rows", "seconds"):
        side: Literal["left", "right"] = "left" if column == "status" else "right"
        table.add_column(column, justify=side, overflow="fold")
    for r in runs:
        c = r.counts
        table.add_row(
            r.run_id,
            f"{r.status}, serves {', '.join(r.serves)} too" if r.serves else r.status,
            f"{r.shards_done}/{r.shards}",
            f"{c.users_recommended:,}",
            f"{c.users_quarantined:,}",
            f"{c.rows_staged:,}",
            "-" if r.seconds is None else f"{r.seconds:.1f}",
        )
    stdout().print(table)


def print_user(view: UserView, config: RunConfig, output: Output) -> None:
    """One user's recommendations."""
    if output is Output.json:
        found: dict[str, Any] = {
            "user": view.user,
            "ds": config.ds,
            "surface": config.surface,
            "run_id": view.run_id,
            "exact": view.exact,
            "why_not": view.why_not,
            "items": view.rows,
        }
        if view.embedding is not None:
            found["embedding"] = view.embedding
        typer.echo(json.dumps(found))
        return
    if view.why_not is not None:
        typer.echo(f"user {view.user} has no recommendations: {view.why_not}")
        return
    if view.embedding is not None:
        first = ", ".join(f"{x:.4f}" for x in view.embedding[:8])
        typer.echo(f"user {view.user}: embedding of {len(view.embedding)} numbers: {first}, …")
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
    stdout().print(table)

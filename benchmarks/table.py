"""The report as tables, for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contenders import OURS

BUSY = 1.5  # slowest turn / fastest turn above which a table says so


def show(report: dict[str, Any]) -> None:
    """Print everything."""
    console = Console(width=144, highlight=False)
    machine = report["machine"]
    console.print(
        f"{machine['hardware']}, {machine['threads']} threads, {machine['dtype']}, "
        f"torch {machine['torch']}\n{report['model']}\n"
        f"one large matmul {machine['matmul_gflops_per_s']:,.0f} GFLOP/s, "
        f"memory {machine['memory_gb_per_s']:.1f} GB/s"
    )
    console.print(_contenders(report))
    console.print(_phases(report))
    console.print(_summary(report))
    for what, why in report["not_run"].items():
        console.print(f"not run: {what}: {why}")
    spreads = [c["spread"] for case in report["cases"] for c in case["contenders"]]
    if max(spreads, default=1.0) > BUSY:
        console.print(
            f"some contender's slowest turn took more than {BUSY:g}x its fastest: the machine was "
            "busy, or there was one turn too few"
        )


def _contenders(report: dict[str, Any]) -> Table:
    table = Table(title="ratio: a contender's median time over ours", title_justify="left")
    for name in ("case", "contender"):
        table.add_column(name, no_wrap=True)
    for name in ("median s", "ratio", "rows", "users/s", "items/s", "mfu", "per 1M users", "timed"):
        table.add_column(name, justify="right")
    for case in report["cases"]:
        table.add_section()
        for one in case["contenders"]:
            ours = one["name"] == OURS
            table.add_row(
                case["name"] if ours else "",
                one["label"],
                f"{one['median_s']:.3f}",
                f"{one['ratio']:.2f}x",
                "" if one["rows"] is None else f"{one['rows']:,}",
                f"{one['users_per_s']:.2f}",
                f"{one['items_per_s']:,.0f}",
                f"{case['mfu']:.0%}" if ours else "",
                f"{one['cost_per_million_users']:,.2f}",
                one["sampled"] or "",
            )
    return table


def _phases(report: dict[str, Any]) -> Table:
    table = Table(
        title="phases of our pass: share of its time, bare matmuls over the phase (mfu), and the "
        "phase's GFLOP/s of the matmuls' own",
        title_justify="left",
    )
    table.add_column("case", no_wrap=True)
    for name in ("prefill", "tree", "head", "selection", "sharing"):
        table.add_column(name, justify="right")
    for case in report["cases"]:
        cells = []
        for phase in case["phases"].values():
            text = f"{phase['share']:.0%}"
            if "mfu" in phase:
                rates = f"{phase['gflops_per_s']:,.0f} of {phase['limit_gflops_per_s']:,.0f}"
                text += f"  {phase['mfu']:.0%}  {rates}"
            cells.append(text)
        table.add_row(case["name"], *cells, f"{case['sharing']:.1f}x")
    return table


def _summary(report: dict[str, Any]) -> Table:
    table = Table(title="in short", title_justify="left", show_header=False)
    for key, value in report["ratios"].items():
        table.add_row(key, _times(value))
    for key, value in report["mfu"].items():
        strict = report["mfu_laid_out"][key]
        beside = "" if strict is None else f"; weights laid out {strict:.1%}"
        table.add_row(f"mfu, {key}", _percent(value) + beside)
    run = report["pipeline"]
    table.add_row("pipeline overhead", _percent(report["pipeline_overhead"]))
    if "start_s" in run:
        users = f"{run['users_per_s_of_run']:.2f}, engine alone {run['users_per_s_of_engine']:.2f}"
        table.add_row("users/s of `nightshelf run`", users)
        table.add_row("its start, paid once", f"{run['start_s']:.1f} s")
    few, many = (f"{n:,}" for n in run.get("memory_users", (0, 0)))
    table.add_row(f"peak memory, {many} / {few} users", _times(report["peak_memory_ratio"]))
    checks = [check for case in report["cases"] for check in case["checks"]]
    if checks:
        worst = max(check["largest_difference_nats"] for check in checks)
        table.add_row("largest difference of a score", f"{worst:.2g} nats")
        overlaps = [check["overlap"] for check in checks if "overlap" in check]
        table.add_row("least overlap of beams", _percent(min(overlaps, default=None)))
    return table


def _times(value: float | None) -> str:
    return "not run" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "not run" if value is None else f"{value:.1%}"

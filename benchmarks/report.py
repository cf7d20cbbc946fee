"""What a comparison prints: a table for people, one JSON document for programs."""

from __future__ import annotations

import dataclasses
import platform
import resource
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.ours import Answer
from benchmarks.workload import FULL_LAYERS, Workload

OURS = "nightshelf"
LIMIT = "bare matmuls"
BUSY = 1.5  # slowest turn / fastest turn above which a run says so


@dataclasses.dataclass(slots=True)
class Contender:
    """One way to do a task, and how long it took each time."""

    task: str
    name: str
    call: Callable[[], Any]
    rows: int  # rows through the layers
    results: int  # items scored or returned
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)


def make_report(
    work: Workload,
    contenders: list[Contender],
    answers: dict[str, Answer],
    checks: list[dict[str, Any]],
    device: torch.device,
) -> dict[str, Any]:
    """The JSON document."""
    ours = {c.task: c for c in contenders if c.name == OURS}
    limit = {c.task: min(c.seconds) for c in contenders if c.name == LIMIT}
    results = []
    for c in contenders:
        row: dict[str, Any] = {
            "task": c.task,
            "name": c.name,
            "median_s": c.median,
            "seconds": c.seconds,
            "spread": max(c.seconds) / min(c.seconds),
            "ratio": c.median / ours[c.task].median,
            "ratio_of_best": min(c.seconds) / min(ours[c.task].seconds),
        }
        if c.rows:
            row["rows"] = c.rows
            row["users_per_s"] = work.shape.users / c.median
            row["items_per_s"] = c.results / c.median
        if c.name == OURS:
            row["rows_forwarded"] = answers[c.task].rows
            row["rows_naive"] = answers[c.task].rows_naive
            row["mfu"] = limit[c.task] / min(c.seconds)
        results.append(row)
    return {
        "hardware": _hardware(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "model": f"Qwen3-0.6B shape, {work.shape.layers} of {FULL_LAYERS} layers, random weights",
        "workload": dataclasses.asdict(work.shape) | {"device": device.type},
        "checks": checks,
        "results": results,
        "peak_rss_mib": _peak_rss_mib(),
        "peak_device_mib": torch.cuda.max_memory_allocated(device) / 2**20
        if device.type == "cuda"
        else None,
    }


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    flags = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in text][:1]
    return " with ".join([names[0] if names else platform.machine(), *flags])


def _peak_rss_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; bytes on macOS
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def show(report: dict[str, Any]) -> None:
    """The table."""
    work = report["workload"]
    title = (
        f"{report['hardware']}, {report['threads']} threads, {work['dtype']}\n{report['model']}\n"
        f"{work['users']} users x {work['prompt_tokens']} prompt tokens; "
        f"{work['candidates']} candidates each, or width {work['width']} and top {work['k']}; "
        f"{work['items']:,} items"
    )
    table = Table(title=title, title_justify="left", title_style="")
    table.add_column("task")
    table.add_column("")
    for name in ("median s", "ratio", "of best", "rows", "users/s", "items/s", "mfu"):
        table.add_column(name, justify="right")
    before = None
    for row in sorted(report["results"], key=lambda r: r["task"] != "score"):
        if before not in (None, row["task"]):
            table.add_section()
        before = row["task"]
        table.add_row(
            row["task"],
            row["name"],
            f"{row['median_s']:.3f}",
            f"{row['ratio']:.2f}x",
            f"{row['ratio_of_best']:.2f}x",
            f"{row['rows']:,}" if "rows" in row else "",
            f"{row['users_per_s']:.2f}" if "rows" in row else "",
            f"{row['items_per_s']:.1f}" if "rows" in row else "",
            f"{row['mfu']:.0%}" if "mfu" in row else "",
        )
    console = Console(width=100, highlight=False)
    console.print(table)
    for row in report["results"]:
        if row["name"] == OURS:
            forwarded, naive = row["rows_forwarded"], row["rows_naive"]
            console.print(
                f"{row['task']}: {forwarded:,} rows forwarded, {naive:,} if each candidate or beam "
                f"sent the prompt again ({naive / forwarded:.1f}x)"
            )
    worst = max(check["largest_difference_nats"] for check in report["checks"])
    overlap = next(check["overlap"] for check in report["checks"] if "overlap" in check)
    console.print(
        f"answers: scores within {worst:.2g} nats of every peer's, "
        f"{overlap:.1%} of the beams' items in common; "
        f"peak memory of the process {report['peak_rss_mib']:,.0f} MiB"
    )
    if max(row["spread"] for row in report["results"]) > BUSY:
        console.print(
            f"some contender's slowest turn took more than {BUSY:g}x its fastest: the machine was "
            "busy; only figures of the best turns mean something (OMP_NUM_THREADS=1 helps)"
        )

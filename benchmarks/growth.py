"""How time grows: the engine's with candidates, beams, prompt length, catalog size and users, and
that of a whole run with workers, which have a core or a GPU each.

One size is changed at a time and everything else stays; each point is the median of a few passes
after a warm-up, the points of one curve taking turns. stdout: one JSON document. `--plot` draws it
(matplotlib), also from a document that was written before.

    python -m benchmarks.growth --json growth.json --plot docs/growth.png
    python -m benchmarks.growth --from growth.json --plot docs/growth.png
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case, compact

if TYPE_CHECKING:
    from benchmarks.checkpoint import Checkpoint

_CODES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One size that grows, and the cases it makes."""

    axis: str
    what: str  # stays the same
    values: tuple[int, ...]
    cases: tuple[Case, ...]


def make_curves(quick: bool) -> list[Curve]:
    """Five curves; shorter ones when `quick`."""

    def case(task: str, value: int, **sizes: Any) -> Case:
        base: dict[str, Any] = {"tokens": (64, 64), "users": 2, "items": 10_000, "name": str(value)}
        if task == "score":
            return Case(task="score", **({"candidates": 200} | base | sizes))
        return Case(task="generate", **({"width": 64, "k": 10} | base | sizes))

    def some(*values: int) -> tuple[int, ...]:
        return values[: 3 if quick else None]

    candidates = some(50, 100, 200, 500, 1000, 2000, 4000)
    beams = some(16, 32, 64, 128, 256, 512)
    tokens = some(32, 64, 128, 256, 512, 1024, 2048)
    items = some(1000, 10_000, 100_000, 1_000_000)
    users = some(1, 2, 4, 8, 16, 32)
    return [
        Curve(
            axis="candidates per user", what="2 users, 64 tokens", values=candidates,
            cases=tuple(case("score", n, candidates=n) for n in candidates),
        ),
        Curve(
            axis="beams", what="2 users, 64 tokens, 10,000 items", values=beams,
            cases=tuple(case("generate", n, width=n) for n in beams),
        ),
        Curve(
            axis="prompt tokens", what="2 users, 200 candidates", values=tokens,
            cases=tuple(case("score", n, tokens=(n, n)) for n in tokens),
        ),
        Curve(
            axis="items in the catalog", what="2 users, 64 tokens, 64 beams", values=items,
            cases=tuple(case("generate", n, items=n) for n in items),
        ),
        Curve(
            axis="users", what="64 tokens, 200 candidates", values=users,
            cases=tuple(case("score", n, users=n) for n in users),
        ),
    ]  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All curves."""
    import torch

    from benchmarks.checkpoint import make_checkpoint
    from benchmarks.report import machine_facts
    from engine.backends.registry import create_backend
    from schemas.settings import EngineSettings

    with tempfile.TemporaryDirectory(prefix="nightshelf-bench-") as folder:
        checkpoint = make_checkpoint(
            Path(folder), name=args.model, layers=args.layers, codes=_CODES, dtype=args.dtype,
            seed=0,
        )  # fmt: skip
        engine = {"model": checkpoint.folder, "dtype": args.dtype, "device": args.device}
        backend = create_backend(EngineSettings.model_validate(engine))
        curves = []
        for curve in make_curves(args.quick):
            print(f"{curve.axis}: {curve.values}", file=sys.stderr, flush=True)
            points = _points(curve, checkpoint, backend, args)
            curves.append({"axis": curve.axis, "what": curve.what, "points": points})
        machine = machine_facts(backend.facts.device, args.dtype)
        backend.close()
        print("workers", file=sys.stderr, flush=True)
        curves.append(_workers(checkpoint, backend.facts.device.type, args))
        machine["threads"] = torch.get_num_threads()
    return {"machine": machine, "model": checkpoint.label, "curves": curves}


def _points(
    curve: Curve, checkpoint: Checkpoint, backend: Any, args: argparse.Namespace
) -> list[dict[str, Any]]:
    from benchmarks.ours import Ours
    from benchmarks.watched import synchronise
    from benchmarks.workload import make_workload

    device = backend.facts.device
    works = [make_workload(case, checkpoint, args.device, 0) for case in curve.cases]
    engines = [Ours(work, backend) for work in works]
    answers = [ours() for ours in engines]  # the warm-up
    seconds: list[list[float]] = [[] for _ in engines]
    for _ in range(args.repeats):
        for ours, times in zip(engines, seconds, strict=True):
            synchronise(device)
            start = time.perf_counter()
            ours()
            synchronise(device)
            times.append(time.perf_counter() - start)
    return [
        {
            "value": value,
            "seconds": statistics.median(times),
            "rows": answer.rows,
            "rows_naive": answer.rows_naive,
            "trie_mb": work.trie.num_bytes / 1e6,
        }
        for value, times, answer, work in zip(curve.values, seconds, answers, works, strict=True)
    ]


def _workers(checkpoint: Checkpoint, device: str, args: argparse.Namespace) -> dict[str, Any]:
    """`nightshelf run` over the same users by 1, 2, 4, … workers of one thread each."""
    import torch

    from benchmarks.pipeline import measure_workers

    most = torch.cuda.device_count() if device == "cuda" else len(os.sched_getaffinity(0))
    counts = [n for n in (1, 2, 4, 8, 16) if n <= most]
    users = args.worker_users
    seconds: dict[int, list[float]] = {n: [] for n in counts}
    os.environ["OMP_NUM_THREADS"] = "1"
    for _ in range(args.repeats):
        for n in counts:
            sizes = {"dtype": args.dtype, "device": device, "codes": _CODES}
            seconds[n].append(measure_workers(checkpoint.folder, users, n, **sizes))
    points = [{"value": n, "seconds": statistics.median(seconds[n])} for n in counts]
    what = f"a run of {users} users, 300 tokens"
    return {"axis": "workers", "what": what, "points": points, "shrinks": True}


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw the curves, seconds against the size, both logarithmic; dashed: linear growth."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    ticker: Any = importlib.import_module("matplotlib.ticker")
    curves = document["curves"]
    figure, panels = pyplot.subplots(1, len(curves), figsize=(3.1 * len(curves), 3.3))
    for panel, curve in zip(panels, curves, strict=True):
        x = [point["value"] for point in curve["points"]]
        y = [point["seconds"] for point in curve["points"]]
        linear = [y[-1] * value / x[-1] for value in x]
        if curve.get("shrinks"):
            linear = [y[0] * x[0] / value for value in x]
        shown = [(v, at) for v, at in zip(x, linear, strict=True) if at >= min(y) / 3]
        panel.plot(x, y, marker="o", color="#1f5fa8", label="engine")
        panel.plot(*zip(*shown, strict=True), linestyle="--", color="#999999", label="linear")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_ylim(min(y) / 3, max(y) * 2)
        panel.set_xticks(x, labels=[compact(value) for value in x], fontsize=8)
        panel.xaxis.set_minor_locator(ticker.NullLocator())
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_locator(ticker.NullLocator())
        panel.set_xlabel(curve["axis"])
        panel.set_title(curve["what"], fontsize=9)
        panel.grid(visible=True, linewidth=0.3)
    panels[0].set_ylabel("seconds of the whole pass")
    panels[0].legend(fontsize=8)
    machine = document["machine"]
    figure.suptitle(f"{document['model']}; {machine['hardware']}, {machine['dtype']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Measure or read, print, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker-users", type=int, default=64, help="users of the runs by workers")
    parser.add_argument("--quick", action="store_true", help="the first three sizes of each")
    parser.add_argument("--json", type=Path, help="write the document here too")
    parser.add_argument("--from", dest="source", type=Path, help="read a document, measure nothing")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    args = parser.parse_args()
    if args.source:
        document: dict[str, Any] = json.loads(args.source.read_text(encoding="utf-8"))
    else:
        document = measure(args)
    line = json.dumps(document)
    if args.json:
        args.json.write_text(line + "\n", encoding="utf-8")
    if args.plot:
        plot(document, args.plot)
    print(line)


if __name__ == "__main__":
    main()

"""Compare the answers, then the times; print a table and one JSON document."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from benchmarks.ours import Answer, BareMatmuls, Ours
from benchmarks.peers import HuggingFace
from benchmarks.workload import FULL_LAYERS, LEVELS, Shape, Workload, make_workload
from engine.registry import create_backend

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # nats, largest difference of one item's score
TOP_K_OVERLAP = {"float32": 1.0, "bfloat16": 0.7}  # least share of beams' items in common
OURS = "nightshelf"


class AnswersDiffer(Exception):
    """A peer and the engine do not agree, so that their times mean nothing."""


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


def run(args: argparse.Namespace) -> int:
    """Everything; the exit code."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    names = [f.name for f in dataclasses.fields(Shape)]
    shape = Shape(**{name: getattr(args, name) for name in names})
    with tempfile.TemporaryDirectory(prefix="nightshelf-bench-") as folder:
        _say(f"making a {shape.layers}-layer model and its work")
        work = make_workload(shape, Path(folder))
        backend = create_backend(work.config("score").engine)
        device = backend.facts.device
        peer = HuggingFace(work, device)
        score, generate = Ours(work, backend, "score"), Ours(work, backend, "generate")
        _say("comparing the answers")
        try:
            scored, generated = score(), generate()
            checks = _check(work, peer, scored, generated)
        except AnswersDiffer as err:
            _say(f"refusing to time: {err}")
            return 1
        contenders = _contenders(work, peer, score, generate, scored, generated)
        limits = {
            "score": BareMatmuls(peer.model, scored.passes),
            "beams": BareMatmuls(peer.model, generated.passes),
        }
        for task, limit in limits.items():
            contenders.append(Contender(task, "bare matmuls", limit, 0, 0))
        _time(contenders, args.repeats, device)
    report = _report(work, contenders, {"score": scored, "beams": generated}, checks, device)
    _show(report)
    line = json.dumps(report)
    if args.json:
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check(
    work: Workload, peer: HuggingFace, scored: Answer, generated: Answer
) -> list[dict[str, Any]]:
    """Differences between us and each peer, all within tolerance; else `AnswersDiffer`."""
    checks = [
        _check_scores("score", "HF, prompt re-sent", peer.score_resending(), scored, work),
        _check_scores("score", "HF, cache copied", peer.score_copying_cache(), scored, work),
    ]
    tokens, scores = peer.beams()
    checks.append(_check_beams(work, tokens, scores.cpu().numpy(), generated))
    return checks


def _check_scores(
    task: str, name: str, want: torch.Tensor, got: Answer, work: Workload
) -> dict[str, Any]:
    worst = float(np.abs(want.float().cpu().numpy() - got.scores).max())
    _demand(name, worst, TOLERANCE[work.shape.dtype])
    return {"task": task, "peer": name, "largest_difference_nats": worst}


def _check_beams(
    work: Workload, tokens: NDArray[np.int64], scores: NDArray[np.float32], got: Answer
) -> dict[str, Any]:
    """Same items (a share of them in bfloat16, where near-ties are cut apart) and same scores."""
    assert got.sids is not None
    ours = work.sid_tokens(got.sids).numpy()
    shared, worst = 0, 0.0
    for user in range(work.shape.users):
        theirs = {tuple(t): s for t, s in zip(tokens[user].tolist(), scores[user], strict=True)}
        for sid, token, score in zip(got.sids[user], ours[user], got.scores[user], strict=True):
            match = theirs.get(tuple(token.tolist()))
            if sid >= 0 and match is not None:
                shared += 1
                worst = max(worst, abs(float(match) - float(score)))
    overlap = shared / got.sids.size
    least = TOP_K_OVERLAP[work.shape.dtype]
    if overlap < least:
        raise AnswersDiffer(f"beams share {overlap:.1%} of their items, expected {least:.0%}")
    _demand("beams", worst, TOLERANCE[work.shape.dtype])
    return {
        "task": "beams",
        "peer": "HF generate",
        "largest_difference_nats": worst,
        "overlap": overlap,
    }


def _demand(name: str, worst: float, tolerance: float) -> None:
    if not worst <= tolerance:  # NaN fails
        raise AnswersDiffer(f"{name}: scores differ by {worst:.3g} nats, tolerance {tolerance}")


def _contenders(
    work: Workload, peer: HuggingFace, score: Ours, generate: Ours, scored: Answer, beams: Answer
) -> list[Contender]:
    s = work.shape
    pairs, returned = s.users * s.candidates, s.users * s.k
    prompts, later = s.users * s.prompt_tokens, LEVELS - 1
    resent = pairs * (s.prompt_tokens + later)
    searched = s.width * (prompts + s.users * later)  # generate() prefills once per beam
    return [
        Contender("score", OURS, score, scored.rows, pairs),
        Contender("score", "HF, prompt re-sent", peer.score_resending, resent, pairs),
        Contender(
            "score", "HF, cache copied", peer.score_copying_cache, prompts + pairs * later, pairs
        ),
        Contender("beams", OURS, generate, beams.rows, returned),
        Contender("beams", "HF generate", peer.beams, searched, returned),
    ]


def _time(contenders: list[Contender], repeats: int, device: torch.device) -> None:
    """Turn by turn, A B C A B C …; the comparison of the answers was the warm-up."""
    for repeat in range(repeats):
        _say(f"timing, turn {repeat + 1} of {repeats}")
        for contender in contenders:
            _synchronise(device)
            start = time.perf_counter()
            contender.call()
            _synchronise(device)
            contender.seconds.append(time.perf_counter() - start)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _report(
    work: Workload,
    contenders: list[Contender],
    answers: dict[str, Answer],
    checks: list[dict[str, Any]],
    device: torch.device,
) -> dict[str, Any]:
    """The JSON document."""
    ours = {c.task: c.median for c in contenders if c.name == OURS}
    limit = {c.task: c.median for c in contenders if c.name == "bare matmuls"}
    results = []
    for c in contenders:
        row: dict[str, Any] = {
            "task": c.task,
            "name": c.name,
            "median_s": c.median,
            "seconds": c.seconds,
            "ratio": c.median / ours[c.task],
        }
        if c.rows:
            row["rows"] = c.rows
            row["users_per_s"] = work.shape.users / c.median
            row["items_per_s"] = c.results / c.median
        if c.name == OURS:
            row["rows_forwarded"] = answers[c.task].rows
            row["rows_naive"] = answers[c.task].rows_naive
            row["mfu"] = limit[c.task] / c.median
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
    flags = " with AMX" if "amx_bf16" in text else ""
    return (names[0] if names else platform.machine()) + flags


def _peak_rss_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; bytes on macOS
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _show(report: dict[str, Any]) -> None:
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
    for name in ("median s", "ratio", "rows", "users/s", "items/s", "mfu"):
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

"""Compare the answers, then take the times."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from benchmarks.ours import Answer, BareMatmuls, Ours
from benchmarks.peers import HuggingFace
from benchmarks.report import LIMIT, OURS, Contender, make_report, show
from benchmarks.workload import LEVELS, Shape, Workload, make_workload
from engine.registry import create_backend

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # nats, largest difference of one item's score
TOP_K_OVERLAP = {"float32": 1.0, "bfloat16": 0.7}  # least share of beams' items in common


class AnswersDiffer(Exception):
    """A peer and the engine do not agree, so that their times mean nothing."""


def run(args: argparse.Namespace) -> int:
    """Everything; the exit code."""
    quiet: Any = transformers_logging  # its functions carry no types
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*past_key_values. is deprecated")
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
            contenders.append(Contender(task, LIMIT, limit, 0, 0))
        _time(contenders, args.repeats, device)
    report = make_report(work, contenders, {"score": scored, "beams": generated}, checks, device)
    show(report)
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

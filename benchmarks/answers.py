"""Peers and the engine must say the same before their times mean anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.linear_packing import LinearPacking
from benchmarks.ours import Answer
from benchmarks.workload import Workload
from engine.backend import Backend
from schemas.requests import Ints

# nats, of one item's score. Near-ties and roundings of bfloat16 fall either way.
LARGEST = {"float32": 1e-4, "bfloat16": 0.25}
MEAN = {"float32": 1e-5, "bfloat16": 0.05}
OVERLAP = {"float32": 1.0, "bfloat16": 0.7}  # least share of beams' items in common


class AnswersDiffer(Exception):
    """A peer and the engine do not agree."""


def check_scores(
    work: Workload, peer: str, want: torch.Tensor | NDArray[np.float32], got: Answer
) -> dict[str, Any]:
    """The peer's scores of the first candidates `[U, n]` against ours."""
    theirs = want.float().cpu().numpy() if isinstance(want, torch.Tensor) else want
    return _demand_near(work, peer, theirs, got.scores[:, : theirs.shape[1]])


def check_beams(
    work: Workload, peer: str, tokens: Ints, scores: NDArray[np.float32], got: Answer
) -> dict[str, Any]:
    """The peer's items `[U, K, 3]` against ours: the same, or a share of them in bfloat16, and
    with the same scores.
    """
    assert got.sids is not None, "beams return semantic IDs"
    ours = work.sid_tokens(got.sids)
    pairs: list[tuple[float, float]] = []
    for user in range(len(ours)):
        theirs = {tuple(t): s for t, s in zip(tokens[user].tolist(), scores[user], strict=True)}
        for sid, token, score in zip(got.sids[user], ours[user], got.scores[user], strict=True):
            match = theirs.get(tuple(token.tolist()))
            if sid >= 0 and match is not None:
                pairs.append((float(match), float(score)))
    overlap, least = len(pairs) / got.sids.size, OVERLAP[work.checkpoint.dtype]
    if overlap < least:
        raise AnswersDiffer(f"{peer}: {overlap:.1%} of the items in common, expected {least:.0%}")
    want, have = np.asarray(pairs, dtype=np.float32).T
    return _demand_near(work, peer, want, have) | {"overlap": overlap}


def check_free_beams(
    work: Workload, peer: str, tokens: Ints, scores: NDArray[np.float32], backend: Backend
) -> dict[str, Any]:
    """Scores `[U, W]` of sequences over the whole vocabulary `[U, W, 3]`, against what our backend
    says of the same sequences: what a search without a trie finds, the trie's search cannot.
    """
    shape = (work.case.users, work.case.width)
    if tokens.shape[:2] != shape or scores.shape != shape:
        raise AnswersDiffer(f"{peer}: {scores.shape} sequences, expected {shape}")
    rescored = LinearPacking(backend, work.packed_prompts, tokens)()
    return _demand_near(work, peer, scores, rescored.float().cpu().numpy())


def _demand_near(
    work: Workload, peer: str, want: NDArray[np.float32], got: NDArray[np.float32]
) -> dict[str, Any]:
    difference = np.abs(want - got)
    largest, mean = float(difference.max()), float(difference.mean())
    dtype = work.checkpoint.dtype
    if not (largest <= LARGEST[dtype] and mean <= MEAN[dtype]):  # NaN fails
        raise AnswersDiffer(
            f"{work.case.name}, {peer}: scores differ by up to {largest:.3g} nats, {mean:.3g} in "
            f"the mean; tolerated are {LARGEST[dtype]} and {MEAN[dtype]}"
        )
    return {"peer": peer, "largest_difference_nats": largest, "mean_difference_nats": mean}

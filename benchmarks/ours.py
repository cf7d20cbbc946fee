"""The engine on a workload: what it says, the rows it took, and its phases.

Legend: U users, C candidates of a user, K results.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.watched import Passes, Watched, synchronise
from benchmarks.workload import Workload
from engine.backend import Backend
from engine.engine import Engine
from schemas.requests import BatchResult, Ints


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call of the engine said, and the rows it took."""

    scores: NDArray[np.float32]  # [U, C] or [U, K]; -inf: no result
    sids: Ints | None  # [U, K] when generating; -1: no result
    rows: int  # rows forwarded
    rows_naive: int  # rows if every candidate and every beam sent the prompt again
    passes: Passes


class Ours:
    """The engine's whole pass, from users to scores, host work included."""

    def __init__(self, work: Workload, backend: Backend) -> None:
        self._work = work
        self._watched = Watched(backend)
        self._engine = Engine(work.config, work.trie, self._watched)
        self._users = work.users

    def __call__(self) -> Answer:
        """Build the prompts, pack the users, run every pack."""
        case, watched = self._work.case, self._watched
        watched.passes = Passes()
        generates = case.task == "generate"
        shape = (case.users, case.k if generates else case.candidates)
        scores = np.full(shape, -np.inf, dtype=np.float32)
        sids = np.full(shape, -1, dtype=np.int64)
        rows = naive = 0
        prepared = self._engine.prepare(self._users)
        for pack in prepared.packs:
            result = self._engine.run(prepared, pack)
            _take(result, pack, scores, sids)
            rows += int(result.rows.sum())
            naive += int(result.rows_naive.sum())
        return Answer(scores, sids if generates else None, rows, naive, watched.passes)

    def phases(self) -> dict[str, float]:
        """Seconds of each phase and of the `whole` pass, the phases kept apart on the device."""
        self._watched.waits = True
        start = time.perf_counter()
        passes = self().passes
        synchronise(self._watched.facts.device)
        whole = time.perf_counter() - start
        self._watched.waits = False
        selection = whole - sum(passes.seconds.values())
        return passes.seconds | {"selection": selection, "whole": whole}


def _take(result: BatchResult, pack: Ints, scores: NDArray[np.float32], sids: Ints) -> None:
    if result.generated is None:
        assert result.scored is not None, "a case has one task"
        scores[pack] = result.scored.score.reshape(len(pack), -1)  # candidates keep their order
        return
    beams = result.generated
    first = np.searchsorted(beams.user, beams.user)
    place = np.arange(len(beams.user)) - first
    scores[pack[beams.user], place] = beams.score
    sids[pack[beams.user], place] = beams.sid

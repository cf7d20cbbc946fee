"""One case from warm-up to figures: answers compared, then turns, A B C A B C …

Ours, its phases, the bare matmuls and every peer take their turns side by side, so that a noisy
machine is noisy to all of them. Every figure is a median over the turns, or a ratio of medians.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.contenders import OURS, Contender, Guests, Invitation, invite
from benchmarks.limit import Limit
from benchmarks.ours import Answer, Ours
from benchmarks.vllm_client import PeerError
from benchmarks.watched import PHASES
from benchmarks.workload import Workload
from engine.backend import Backend
from engine.backends.torch.code_paths import choose


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A case that has been timed."""

    work: Workload
    answer: Answer
    contenders: list[Contender]  # ours first
    phases: list[dict[str, float]]  # seconds of each turn
    limits: list[dict[str, float]]
    stricter: list[dict[str, float]]  # with weights laid out; none where there is no such thing
    flops: dict[str, int]
    checks: list[dict[str, Any]]
    skipped: dict[str, str]  # peers that could not take part, and why

    @property
    def ours(self) -> Contender:
        """The engine."""
        return self.contenders[0]

    @property
    def limit_seconds(self) -> float:
        """Median of the bare matmuls of the whole pass."""
        return median_of(self.limits, "whole")

    @property
    def stricter_seconds(self) -> float | None:
        """The same with weights laid out."""
        return median_of(self.stricter, "whole") if self.stricter else None

    def ratio(self, name: str) -> float | None:
        """A peer's median over ours; None: it took no part."""
        for contender in self.contenders:
            if contender.name == name:
                return contender.median / self.ours.median
        return None

    def phase_figures(self) -> dict[str, dict[str, float]]:
        """Per phase: seconds, share of the pass, and where there are matmuls their limit, `mfu`
        and GFLOP/s.
        """
        whole = median_of(self.phases, "whole")
        figures = {}
        for phase in (*PHASES, "selection"):
            seconds = median_of(self.phases, phase)
            figures[phase] = {"seconds": seconds, "share": seconds / whole}
            if self.flops.get(phase):
                limit = median_of(self.limits, phase)
                figures[phase] |= {
                    "limit_seconds": limit,
                    "mfu": limit / seconds,
                    "gflops_per_s": self.flops[phase] / seconds / 1e9,
                    "limit_gflops_per_s": self.flops[phase] / limit / 1e9,
                }
        return figures


def median_of(turns: list[dict[str, float]], name: str) -> float:
    """Median over the turns of one figure."""
    return statistics.median(turn[name] for turn in turns)


def play(work: Workload, backend: Backend, guests: Guests, *, sample: int, repeats: int) -> Played:
    """Compare the answers, then take the turns.

    Raises:
        AnswersDiffer: a peer's answer is not ours; nothing was timed.
    """
    say(f"{work.case.name}: {work.case.label}")
    ours = Ours(work, backend)
    answer = ours()
    limit = Limit(guests.model, answer.passes)
    prepack = choose(backend.facts.device, guests.model.dtype, head_dim=0).prepack
    stricter = Limit(guests.model, answer.passes, prepack) if prepack else None
    first = Contender(OURS, lambda: ours.phases()["whole"], answer.rows)
    played = Played(
        work=work,
        answer=answer,
        contenders=[first],
        phases=[],
        limits=[],
        stricter=[],
        flops=limit.flops(),
        checks=[],
        skipped={},
    )
    invitation = Invitation(work=work, answer=answer, guests=guests, backend=backend, sample=sample)
    for peer in filter(guests.has, work.case.peers):
        try:
            contender, check = invite(peer, invitation)
        except PeerError as err:
            played.skipped[peer] = str(err)
            say(f"  {peer} takes no part: {err}")
            continue
        played.contenders.append(contender)
        played.checks.append(check)
    on_cpu = backend.facts.device.type == "cpu"
    if not on_cpu:  # there keeping phases apart costs time, so that they have turns of their own
        played.contenders[0] = dataclasses.replace(first, turn=invitation.timed(ours))
    for turn in range(repeats):
        say(f"  turn {turn + 1} of {repeats}")
        _take_turns(played, ours, (limit, stricter), on_cpu)
    return played


def _take_turns(
    played: Played, ours: Ours, limits: tuple[Limit, Limit | None], on_cpu: bool
) -> None:
    phases = ours.phases()
    played.phases.append(phases)
    if on_cpu:
        played.ours.seconds.append(phases["whole"])
    else:
        played.ours.take_turn()
    limit, stricter = limits
    played.limits.append(limit())
    if stricter is not None:
        played.stricter.append(stricter())
    for contender in played.contenders[1:]:
        contender.take_turn()


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)

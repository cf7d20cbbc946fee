"""Everyone who takes part in a case: how they are asked, checked and timed.

A contender that re-sends the prompt for every candidate may be timed on a sample of each user's
candidates; its time is then multiplied by the share, which `sampled` says in the report.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from benchmarks.answers import check_beams, check_free_beams, check_scores
from benchmarks.checkpoint import LEVELS
from benchmarks.ctranslate import CTranslate2
from benchmarks.huggingface import HuggingFace
from benchmarks.linear_packing import LinearPacking
from benchmarks.ours import Answer
from benchmarks.vllm_client import VLLM, VLLMWork
from benchmarks.watched import synchronise
from benchmarks.workload import Workload
from engine.backend import Backend

OURS = "ours"
PEERS = {
    "resend": "HF, prompt re-sent",
    "hf_shared": "HF, prompt's KV shared",
    "linear": "linear multi-item packing",
    "vllm": "vLLM prompt_logprobs",
    "vllm_cached": "vLLM prompt_logprobs, cache forced",
    "hf": "HF generate",
    "beams_vllm": "vLLM beam_search, no trie",
    "ctranslate2": "CTranslate2 beams, no trie",
}


@dataclass(slots=True)
class Contender:
    """One way to do a case, and how long each turn took, as if the whole case had been done."""

    name: str
    turn: Callable[[], float]  # seconds
    rows: int | None  # rows through the layers for the whole case; None: not known
    sampled: tuple[int, int] | None = None  # candidates timed, of so many
    seconds: list[float] = field(default_factory=list)

    def take_turn(self) -> None:
        """Do it once more."""
        self.seconds.append(self.turn() * scale_of(self.sampled))

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)


def scale_of(sampled: tuple[int, int] | None) -> float:
    """What a time on `n of N` candidates is multiplied by."""
    return 1.0 if sampled is None else sampled[1] / sampled[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guests:
    """Peers that are there, loaded once for all cases; None: not run."""

    model: PreTrainedModel
    vllm: VLLM | None
    ctranslate2: Any | None

    def has(self, peer: str) -> bool:
        """Whether a peer takes part."""
        if peer in ("vllm", "vllm_cached", "beams_vllm"):
            return self.vllm is not None
        return peer != "ctranslate2" or self.ctranslate2 is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What a peer needs to know: the work, our answer, and where the models are."""

    work: Workload
    answer: Answer
    guests: Guests
    backend: Backend
    sample: int  # candidates of a user that a peer re-sending the prompt is timed on

    @property
    def candidates_timed(self) -> int:
        """The sample, or all candidates where they are fewer."""
        return min(self.sample, self.work.case.candidates)

    @property
    def sampled(self) -> tuple[int, int] | None:
        """`n of N` candidates; None: all of them."""
        count, total = self.candidates_timed, self.work.case.candidates
        return (count, total) if count < total else None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self.work.prompt_codes.offsets[-1])

    def rows_resent(self, per_item: int) -> int:
        """Rows when each candidate sends its prompt and `per_item` tokens."""
        case = self.work.case
        return case.candidates * (self.prompt_tokens + case.users * per_item)

    def timed(self, call: Callable[[], Any]) -> Callable[[], float]:
        """Wall-clock seconds of a call, the device's work included."""
        device = self.backend.facts.device

        def turn() -> float:
            synchronise(device)
            start = time.perf_counter()
            call()
            synchronise(device)
            return time.perf_counter() - start

        return turn


Invited = tuple[Contender, dict[str, Any]]


def invite(peer: str, to: Invitation) -> Invited:
    """A peer that has given its answer, which is its warm-up, and how near it is to ours.

    Raises:
        AnswersDiffer: it is not near.
        PeerError: it could not answer.
    """
    return _INVITED[peer](to)


def _resend(to: Invitation) -> Invited:
    hf, count = HuggingFace(to.work, to.guests.model), to.candidates_timed
    check = check_scores(to.work, "resend", hf.score_resending(count), to.answer)
    turn = to.timed(lambda: hf.score_resending(count))
    return Contender("resend", turn, to.rows_resent(LEVELS - 1), to.sampled), check


def _hf_shared(to: Invitation) -> Invited:
    hf, case = HuggingFace(to.work, to.guests.model), to.work.case
    check = check_scores(to.work, "hf_shared", hf.score_sharing_cache(), to.answer)
    rows = to.prompt_tokens + case.users * case.candidates * (LEVELS - 1)
    return Contender("hf_shared", to.timed(hf.score_sharing_cache), rows), check


def _linear(to: Invitation) -> Invited:
    linear = LinearPacking(to.backend, to.work.packed_prompts, to.work.candidate_tokens)
    check = check_scores(to.work, "linear", linear(), to.answer)
    return Contender("linear", to.timed(linear), linear.rows), check


def _vllm(to: Invitation, *, read_cache: bool = False) -> Invited:
    assert to.guests.vllm is not None, "only those who are there are invited"
    name = "vllm_cached" if read_cache else "vllm"
    asked = VLLMWork(to.guests.vllm, to.work, to.candidates_timed)
    check = check_scores(to.work, name, asked.score(read_cache=read_cache), to.answer)
    rows = None if read_cache else to.rows_resent(LEVELS)
    turn = functools.partial(asked.time_score, read_cache=read_cache)
    return Contender(name, turn, rows, to.sampled), check


def _hf_beams(to: Invitation) -> Invited:
    hf, case = HuggingFace(to.work, to.guests.model), to.work.case
    tokens, scores = hf.beams()
    check = check_beams(to.work, "hf", tokens, scores.cpu().numpy(), to.answer)
    rows = case.width * (to.prompt_tokens + case.users * (LEVELS - 1))  # it prefills once per beam
    return Contender("hf", to.timed(hf.beams), rows), check


def _vllm_beams(to: Invitation) -> Invited:
    assert to.guests.vllm is not None, "only those who are there are invited"
    asked = VLLMWork(to.guests.vllm, to.work)
    check = check_free_beams(to.work, "beams_vllm", *asked.beams(), to.backend)
    return Contender("beams_vllm", asked.time_beams, None), check


def _ctranslate2(to: Invitation) -> Invited:
    translator = CTranslate2(to.guests.ctranslate2, to.work)
    check = check_free_beams(to.work, "ctranslate2", *translator.beams(), to.backend)
    return Contender("ctranslate2", to.timed(translator.beams), None), check


_INVITED: dict[str, Callable[[Invitation], Invited]] = {
    "resend": _resend,
    "hf_shared": _hf_shared,
    "linear": _linear,
    "vllm": _vllm,
    "vllm_cached": functools.partial(_vllm, read_cache=True),
    "hf": _hf_beams,
    "beams_vllm": _vllm_beams,
    "ctranslate2": _ctranslate2,
}

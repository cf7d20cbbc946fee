"""Which workloads are run, and how large: every number is a flag of the command line.

A case is one question about some users: score their candidates, or search the catalog. Names say
the question, the prompt, and the size that matters: `score-300-1000`, `beam-64-128`; a large
catalog stands before it: `beam-300-1M-128`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Task = Literal["score", "generate"]
PromptKind = Literal["history", "soft_token", "long"]


def _number(default: int, meaning: str) -> int:
    value: int = field(default=default, metadata={"help": meaning})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Every size that can be changed."""

    layers: int = _number(8, "layers of the model; the whole one has 28")
    users: int = _number(2, "users of a case that peers run too, and of long prompts")
    beam_users: int = _number(8, "users of a case where vLLM or CTranslate2 search beams")
    batch_users: int = _number(4, "users of the other cases with history prompts")
    soft_users: int = _number(16, "users with soft-token prompts")
    soft_tokens: int = _number(32, "tokens of a soft-token prompt, the soft tokens included")
    short_tokens: int = _number(64, "tokens of a short history prompt")
    history_tokens: int = _number(300, "tokens of a history prompt")
    long_min: int = _number(1000, "shortest long prompt")
    long_max: int = _number(2500, "longest long prompt")
    few_candidates: int = _number(100, "candidates of a user, where few")
    candidates: int = _number(1000, "candidates of a user")
    narrow: int = _number(32, "beams, narrow")
    width: int = _number(128, "beams")
    wide: int = _number(512, "beams, wide")
    vllm_width: int = _number(64, "beams where vLLM or CTranslate2 is the peer")
    k: int = _number(10, "items that a search returns")
    items: int = _number(10_000, "items of the catalog")
    many_items: int = _number(1_000_000, "items of the large catalog")
    codes: int = _number(256, "codes of each of the 3 levels")
    sample: int = _number(64, "candidates of a user that a peer re-sending the prompt is timed on")
    repeats: int = _number(3, "turns of each contender")
    run_users: int = _number(256, "users of the run through `nightshelf run`")
    memory_users: int = _number(100_000, "users of the larger run of the fake backend")


QUICK = Sizes(
    layers=2, users=2, beam_users=2, batch_users=2, soft_users=4, long_min=500, long_max=1000,
    few_candidates=50, candidates=200, narrow=16, width=32, wide=64, vllm_width=16,
    many_items=100_000, sample=16, repeats=3, run_users=48, memory_users=20_000,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload."""

    name: str
    task: Task
    prompt: PromptKind = "history"
    tokens: tuple[int, int]  # shortest and longest prompt
    users: int
    candidates: int = 0  # of a user
    shared: bool = False  # all users have the same candidates
    width: int = 0
    k: int = 10
    items: int
    peers: tuple[str, ...] = ()  # names of PEERS in benchmarks/contenders.py

    @property
    def label(self) -> str:
        """The case in words."""
        low, high = self.tokens
        length = f"{low}" if low == high else f"{low}-{high}"
        kind = "soft-token" if self.prompt == "soft_token" else "history"
        what = (
            f"{self.candidates:,}{' shared' if self.shared else ''} candidates"
            if self.task == "score"
            else f"{self.width} beams, top {self.k}, {self.items:,} items"
        )
        return f"{self.users} users, {length}-token {kind} prompts, {what}"


SCORE_PEERS = ("resend", "hf_shared", "linear", "vllm", "vllm_cached")


def make_cases(s: Sizes) -> list[Case]:
    """The headline cases, which peers run too, and then those of our engine alone."""

    def score(name: str, tokens: tuple[int, int], users: int, candidates: int, **more: Any) -> Case:
        return Case(
            name=f"score-{name}-{candidates}", task="score", tokens=tokens, users=users,
            candidates=candidates, items=s.items, **more,
        )  # fmt: skip

    def beams(name: str, tokens: int, users: int, width: int, **more: Any) -> Case:
        return Case(
            name=f"beam-{name}-{width}", task="generate", tokens=(tokens, tokens), users=users,
            width=width, k=min(s.k, width), **{"items": s.items} | more,
        )  # fmt: skip

    short, history, soft = s.short_tokens, s.history_tokens, s.soft_tokens
    both = (history, history)
    cases = [
        score(f"{history}", both, s.users, s.candidates, peers=SCORE_PEERS),
        beams(f"{short}", short, s.users, s.width, peers=("hf",)),
        beams(f"{history}", history, s.users, s.width, peers=("hf",)),
        beams(f"{short}", short, s.beam_users, s.vllm_width, peers=("beams_vllm", "ctranslate2")),
        beams(
            f"{history}", history, s.beam_users, s.vllm_width, peers=("beams_vllm", "ctranslate2")
        ),
        score(f"{history}", both, s.batch_users, s.few_candidates),
        score(f"{history}-shared", both, s.batch_users, s.candidates, shared=True),
        score("long", (s.long_min, s.long_max), s.users, s.candidates, prompt="long"),
        score("soft", (soft, soft), s.soft_users, s.few_candidates, prompt="soft_token"),
        score("soft", (soft, soft), s.soft_users, s.candidates, prompt="soft_token"),
        beams("soft", soft, s.soft_users, s.width, prompt="soft_token"),
        beams(f"{history}", history, s.batch_users, s.narrow),
        beams(f"{history}", history, s.users, s.wide),
        beams(f"{history}-{compact(s.many_items)}", history, s.users, s.width, items=s.many_items),
    ]
    unique: dict[str, Case] = {}
    for case in cases:  # sizes that were made alike are one case, with the peers of both
        first = unique.setdefault(case.name, case)
        peers = dict.fromkeys((*first.peers, *case.peers))
        unique[case.name] = dataclasses.replace(first, peers=tuple(peers))
    return list(unique.values())


def compact(value: int) -> str:
    """12, 5k, 1M."""
    for unit, letter in ((1_000_000, "M"), (1000, "k")):
        if value >= unit and value % unit == 0:
            return f"{value // unit}{letter}"
    return str(value)


def changed(sizes: Sizes, given: dict[str, int | None]) -> Sizes:
    """The sizes with those that were given."""
    return dataclasses.replace(sizes, **{k: v for k, v in given.items() if v is not None})

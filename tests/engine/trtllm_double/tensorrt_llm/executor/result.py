"""What a request comes back with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Logprob:
    """Of one token."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One beam."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    generation_logits: Any = None


@dataclass(slots=True)
class RequestOutput:
    """All beams of one prompt."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    error: str | None = None

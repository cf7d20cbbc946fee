"""SamplingParams: keyword-only, unknown keywords raise TypeError, as a dataclass does."""

from __future__ import annotations

from typing import Any

from tensorrt_llm import contract
from tensorrt_llm.recorder import record


class SamplingParams:
    """Fields and defaults of the contract."""

    def __init__(self, **kwargs: Any) -> None:
        record("SamplingParams", **kwargs)
        fields = contract.constructor("SamplingParams")
        for name in kwargs:
            if name not in fields:
                raise TypeError(
                    f"SamplingParams.__init__() got an unexpected keyword argument {name!r}"
                )
        for name, default in (fields | kwargs).items():
            setattr(self, name, default)
        if self.best_of is None:
            self.best_of = self.n
        if self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if self.best_of > 1 and not self.use_beam_search and not (self.top_k or self.top_p):
            raise ValueError("Greedy decoding in the LLM API does not allow multiple returns")
        if self.pad_id is None:
            self.pad_id = self.end_id

    @property
    def beam_width(self) -> int:
        """Width that the request asks for."""
        return self.best_of if self.use_beam_search else 1


class LogitsProcessor:
    """Called in place on logits; with beams it sees slot histories (see `beams.py`)."""

    def __call__(self, req_id, logits, token_ids, stream_ptr, client_id) -> None:
        raise NotImplementedError

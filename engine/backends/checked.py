"""A backend held to its contract: every answer has the count, the width and the type that was asked
for. Answers are joined to users by position, so that one too many would give each user another's.

Shapes and types are known without waiting for the device; values are looked at where they are used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.backend import Backend, BackendFacts, Context, NodeBatch, Norm, PackedPrompts, Targets
from engine.generate.native_beams import NativeBackend, Raw
from schemas.errors import EngineError
from schemas.requests import Ints
from schemas.settings import Pooling


class CheckedBackend:
    """The same backend; an answer of another shape than was asked for is an `EngineError`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def facts(self) -> BackendFacts:
        """Sizes, precision and device."""
        return self._backend.facts

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Context:
        """As the backend's; a context of these prompts and no other row."""
        context = self._backend.prefill(prompts, max_nodes)
        want = (prompts.num_prompts, prompts.num_prompts)
        self._expect("prompts and rows of a context", (context.num_prompts, context.num_rows), want)
        return context

    def extend(self, context: Context, nodes: NodeBatch) -> None:
        """As the backend's; each node is one row more."""
        want = context.num_rows + len(nodes.token)
        self._backend.extend(context, nodes)
        self._expect("rows of an extended context", context.num_rows, want)

    def log_probs(self, context: Context, rows: Tensor, targets: Targets, norm: Norm) -> Tensor:
        """As the backend's; one number per target."""
        found = self._backend.log_probs(context, rows, targets, norm)
        self._expect_tensor("log-probabilities", found, (len(targets.row),))
        return found

    def embed(self, prompts: PackedPrompts, pooling: Pooling) -> Tensor:
        """As the backend's; one vector of the announced width per prompt."""
        found = self._backend.embed(prompts, pooling)
        want = (prompts.num_prompts, self.facts.embedding_width)
        self._expect_tensor("embeddings", found, want)
        return found

    def close(self) -> None:
        """Free the device."""
        self._backend.close()

    def _expect_tensor(self, what: str, found: Any, shape: tuple[int, ...]) -> None:
        if not isinstance(found, Tensor):
            self._expect(f"type of {what}", type(found).__name__, "Tensor")
        self._expect(what, (tuple(found.shape), found.dtype), (shape, torch.float32))

    def _expect(self, what: str, got: Any, want: Any) -> None:
        if got != want:
            raise EngineError(
                f"backend {self.facts.name} gave another number of {what} than it was asked for",
                expected=str(want),
                got=str(got),
                do="Nothing of this shard is kept: which answer is whose cannot be known.",
            )


class CheckedNativeBackend(CheckedBackend):
    """A checked backend with a beam search of its own."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        assert isinstance(backend, NativeBackend), "`checked` looked"
        self._native: NativeBackend = backend
        self._shape = (0, 0)

    def start_beams(self, *, width: int, steps: int, prompt_tokens: int) -> None:
        """Make the search ready."""
        self._shape = (width, steps)
        self._native.start_beams(width=width, steps=steps, prompt_tokens=prompt_tokens)

    def native_beams(self, context: Any) -> Raw:
        """As the backend's; as many beams as were asked for, for each prompt."""
        raw = self._native.native_beams(context)
        num, (width, steps) = context.num_prompts, self._shape
        wanted = {
            "tokens": ((num, width, steps), "i"),
            "length": ((num, width), "i"),
            "score": ((num, width), "f"),
            "failed": ((num,), "b"),
        }
        for name, want in wanted.items():
            array = np.asarray(getattr(raw, name))
            self._expect(f"{name} of native beams", (array.shape, array.dtype.kind), want)
        return raw


def checked(backend: Backend) -> CheckedBackend:
    """The backend, held to its contract."""
    if isinstance(backend, NativeBackend):
        return CheckedNativeBackend(backend)
    return CheckedBackend(backend)


def forwarded(context: Context) -> Ints | None:
    """Tokens that were sent for each prompt until now `[B]`; None where each went once."""
    sent: Ints | None = getattr(context, "forwarded", None)
    if sent is not None and np.shape(sent) != (context.num_prompts,):
        raise EngineError(
            "a context counts the tokens of other prompts than its own",
            expected=f"{context.num_prompts} counts",
            got=f"shape {np.shape(sent)}",
        )
    return sent

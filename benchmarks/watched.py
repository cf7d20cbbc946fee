"""A backend that notes the rows and the time of each phase, and otherwise is the one it holds.

Phases of a pass of the engine: *prefill* (prompts through the layers), *tree* (nodes and beams
through the layers), *head* (log-probabilities), and *selection*, which is everything else: building
prompts and trees, expanding and choosing beams, taking results off the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.backend import (
    Backend,
    BackendFacts,
    Context,
    NodeBatch,
    Norm,
    PackedPrompts,
    Targets,
)
from schemas.settings import Pooling

PHASES = ("prefill", "tree", "head")


@dataclass(slots=True)
class Passes:
    """What went through the device in each call, and how long each phase took."""

    prefill: list[tuple[int, int]] = field(default_factory=list)  # rows and prompts of each pass
    tree: list[int] = field(default_factory=list)  # rows
    head: list[tuple[int, int]] = field(default_factory=list)  # rows, and columns read
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


class Watched:
    """The backend and its `passes`, which a caller replaces before what it wants to see."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.passes = Passes()
        self.waits = False  # on CUDA: wait at the end of each phase, which costs what overlaps

    @property
    def facts(self) -> BackendFacts:
        """Sizes, precision and device."""
        return self._backend.facts

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Context:
        """Note the prompt tokens and the prompts."""
        self.passes.prefill.append((len(prompts.token_ids), prompts.num_prompts))
        with self._timed("prefill"):
            return self._backend.prefill(prompts, max_nodes)

    def extend(self, context: Context, nodes: NodeBatch) -> None:
        """Note the nodes."""
        self.passes.tree.append(len(nodes.token))
        with self._timed("tree"):
            self._backend.extend(context, nodes)

    def log_probs(self, context: Context, rows: Tensor, targets: Targets, norm: Norm) -> Tensor:
        """Note the rows read, and the columns that the normaliser needs."""
        columns = targets.columns if norm.kind == "trie" else norm.columns
        width = self.facts.vocab_size if norm.kind == "full_vocab" or columns is None else (
            len(columns.token_ids)
        )  # fmt: skip
        self.passes.head.append((len(rows), width))
        with self._timed("head"):
            return self._backend.log_probs(context, rows, targets, norm)

    def embed(self, prompts: PackedPrompts, pooling: Pooling) -> Tensor:
        """Not part of any case."""
        return self._backend.embed(prompts, pooling)

    def close(self) -> None:
        """Free the device."""
        self._backend.close()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.waits:
            synchronise(self.facts.device)
        self.passes.seconds[phase] += time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

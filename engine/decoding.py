"""Prompts that are prefilled and the catalog to decode over: what every algorithm works on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from engine.backend import Backend, Context, NodeBatch, Norm, Targets
from engine.trees.device_trie import DeviceTrie


@dataclass(frozen=True, slots=True)
class Decoding:
    """One context of a backend, and the trie of the items that may follow its prompts."""

    backend: Backend
    context: Context
    index: DeviceTrie

    @property
    def num_prompts(self) -> int:
        """B."""
        return self.context.num_prompts

    def extend(self, nodes: NodeBatch) -> None:
        """Forward nodes and append them to the context."""
        self.backend.extend(self.context, nodes)

    def log_probs(self, rows: Tensor, targets: Targets, norm: Norm) -> Tensor:
        """Log-probabilities of targets at rows of the context, float32 `[M]` nats."""
        return self.backend.log_probs(self.context, rows, targets, norm)

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Nodes that are appended inside are forgotten at its end; their memory is used again."""
        before = self.context.num_rows
        yield
        self.context.rewind(before)

"""Fake backends for the cases, over the public one. Named in a config as `tests.cases.backends:…`.

A prompt is *marked* when it holds the byte '!' (33).
"""

from __future__ import annotations

from typing import Any

import torch

from engine.backend import NodeBatch, Norm, PackedPrompts, Targets
from engine.backends.fake.backend import FakeBackend
from schemas.settings import EngineSettings


class FlatBackend(FakeBackend):
    """Every token has the same probability, so that every order comes from the tie rules."""

    def log_probs(self, context: Any, rows: Any, targets: Targets, norm: Norm) -> Any:
        return torch.full((len(targets.row),), -1.0)


class MarkedBackend(FakeBackend):
    """Knows which rows belong to marked prompts: `context.marked` `[rows]`."""

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Any:
        context = super().prefill(prompts, max_nodes)
        bounds = zip(prompts.offsets[:-1], prompts.offsets[1:], strict=True)
        marked = [bool((prompts.token_ids[a:b] == 33).any()) for a, b in bounds]
        context.marked = torch.tensor(marked)
        return context

    def extend(self, context: Any, nodes: NodeBatch) -> None:
        super().extend(context, nodes)
        context.marked = torch.cat([context.marked, context.marked[nodes.prompt]])


class BlockedBackend(MarkedBackend):
    """Marked prompts give every legal token the probability 0, log-probability -inf."""

    def log_probs(self, context: Any, rows: Any, targets: Targets, norm: Norm) -> Any:
        out = super().log_probs(context, rows, targets, norm)
        return torch.where(context.marked[rows[targets.row]], -torch.inf, out)


class RaisingBackend(MarkedBackend):
    """The engine raises on a marked prompt."""

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Any:
        context = super().prefill(prompts, max_nodes)
        if context.marked.any():
            raise RuntimeError("the engine met a prompt it cannot bear")
        return context


def flat_backend(settings: EngineSettings) -> FlatBackend:
    return FlatBackend(settings.seed)


def blocked_backend(settings: EngineSettings) -> BlockedBackend:
    return BlockedBackend(settings.seed)


def raising_backend(settings: EngineSettings) -> RaisingBackend:
    return RaisingBackend(settings.seed)

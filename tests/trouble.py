"""Backends that fail on purpose, over the fake one. Named in a config as `tests.trouble:…`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from engine.backend import NodeBatch, Norm, PackedPrompts, Targets
from engine.backends.fake.backend import FakeBackend
from schemas.settings import EngineSettings


class FailingBackend(FakeBackend):
    """A fake that gives NaN for prompts that hold a marked token."""

    def __init__(self, bad_token: int) -> None:
        super().__init__()
        self._bad = bad_token
        self._bad_rows: set[int] = set()

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Any:
        context = super().prefill(prompts, max_nodes)
        context.bad = torch.tensor(
            [
                bool((prompts.token_ids[a:b] == self._bad).any())
                for a, b in zip(prompts.offsets[:-1], prompts.offsets[1:], strict=True)
            ]
        )
        return context

    def extend(self, context: Any, nodes: NodeBatch) -> None:
        super().extend(context, nodes)
        context.bad = torch.cat([context.bad, context.bad[nodes.prompt]])

    def log_probs(self, context: Any, rows: Any, targets: Targets, norm: Norm) -> Any:
        out = super().log_probs(context, rows, targets, norm)
        return torch.where(context.bad[rows[targets.row]], torch.nan, out)


def nan_backend(settings: EngineSettings) -> FailingBackend:
    """NaN for prompts with the byte '!' (33): `engine.backend: tests.trouble:nan_backend`."""
    return FailingBackend(33)


class TroubleBackend(FakeBackend):
    """A fake that misbehaves as files in the folder `NIGHTSHELF_TEST_TROUBLE` say.

    `slow` holds seconds to sleep in each prefill. When a prompt holds '!', `poison` kills the
    process, `dead_engine` breaks the backend for good, and `wedge` makes it hang, once. A trouble
    ends when its file is removed.
    """

    _dead = False

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Any:
        trouble = Path(os.environ["NIGHTSHELF_TEST_TROUBLE"])
        marked = bool((prompts.token_ids == 33).any())
        if (trouble / "slow").exists():
            time.sleep(float((trouble / "slow").read_text()))
        if marked and (trouble / "poison").exists():
            os._exit(7)
        if marked and (trouble / "dead_engine").exists():
            self._dead = True
        if self._dead:  # and stays dead, as a CUDA context does
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if marked and (trouble / "wedge").exists():
            (trouble / "wedge").unlink()
            time.sleep(600)
        return super().prefill(prompts, max_nodes)


def trouble_backend(settings: EngineSettings) -> TroubleBackend:
    """`engine.backend: tests.trouble:trouble_backend`."""
    return TroubleBackend(settings.seed)


def no_memory_backend(settings: EngineSettings) -> FakeBackend:
    """Cannot start: `engine.backend: tests.trouble:no_memory_backend`."""
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")


class SmallBackend(FakeBackend):
    """A fake whose device holds 200 rows."""

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Any:
        if len(prompts.token_ids) + max_nodes > 200:
            raise torch.OutOfMemoryError("out of memory, as torch says it")
        return super().prefill(prompts, max_nodes)


def small_backend(settings: EngineSettings) -> SmallBackend:
    """Out of memory beyond 200 rows: `engine.backend: tests.trouble:small_backend`."""
    return SmallBackend(settings.seed)


def slow_start_backend(settings: EngineSettings) -> FakeBackend:
    """Says that it starts, and does not: `engine.backend: tests.trouble:slow_start_backend`.

    Without the folder's file `slow_start` it starts at once.
    """
    trouble = Path(os.environ["NIGHTSHELF_TEST_TROUBLE"])
    if (trouble / "slow_start").exists():
        (trouble / "starts").touch()
        time.sleep(600)
    return FakeBackend(settings.seed)

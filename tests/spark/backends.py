"""Backends for Spark's workers, over the fake one. What they do wrong is in their name.

Workers are forked from a process that started before the test: they see no variable a test sets.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.backend import PackedPrompts
from engine.backends.fake.backend import FakeBackend
from schemas.settings import EngineSettings


def _marked(prompts: PackedPrompts) -> bool:
    return bool((prompts.token_ids == 33).any()) and "NIGHTSHELF_TEST_CURED" not in os.environ


class _Killing(FakeBackend):
    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Any:
        if _marked(prompts):
            os._exit(7)
        return super().prefill(prompts, max_nodes)


class _Raising(FakeBackend):
    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Any:
        if _marked(prompts):
            raise RuntimeError("the engine met a prompt it cannot bear")
        return super().prefill(prompts, max_nodes)


class _WedgedOnce(FakeBackend):
    """Hangs in the first prefill of the first process that gets here."""

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Any:
        token = Path(tempfile.gettempdir()) / f"nightshelf-wedged-{os.getppid()}"
        try:
            token.touch(exist_ok=False)
        except FileExistsError:
            token.unlink()
        else:
            time.sleep(600)
        return super().prefill(prompts, max_nodes)


def killing_backend(settings: EngineSettings) -> FakeBackend:
    """Kills its process at a prompt with the byte '!'."""
    return _Killing(settings.seed)


def raising_backend(settings: EngineSettings) -> FakeBackend:
    """Breaks at a prompt with the byte '!'."""
    return _Raising(settings.seed)


def wedged_once_backend(settings: EngineSettings) -> FakeBackend:
    """Hangs once."""
    return _WedgedOnce(settings.seed)


class _Slow(FakeBackend):
    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Any:
        time.sleep(0.4)
        return super().prefill(prompts, max_nodes)


def slow_backend(settings: EngineSettings) -> FakeBackend:
    """Takes its time, so that a test can act in the middle of a run."""
    return _Slow(settings.seed)


def never_started_backend(settings: EngineSettings) -> FakeBackend:
    """Hangs while it loads."""
    time.sleep(600)
    return FakeBackend(settings.seed)


def late_folder(seed: int) -> Path:
    """Where the engines of `late_backend` of one test see each other."""
    return Path(tempfile.gettempdir()) / f"nightshelf-late-{seed}"


def late_backend(settings: EngineSettings) -> FakeBackend:
    """The first one loads until two others could not, and then some; later ones are well."""
    folder = late_folder(settings.seed)
    folder.mkdir(exist_ok=True)
    broken = [folder / "broken-0", folder / "broken-1"]
    if _is_first(folder / "late"):
        while not all(path.exists() for path in broken):
            time.sleep(0.1)
        time.sleep(3)
    elif any(_is_first(path) for path in broken):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
    return FakeBackend(settings.seed)


def _is_first(token: Path) -> bool:
    try:
        token.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

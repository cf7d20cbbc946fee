"""Backends over the fake one that raise a chosen error at a prompt with the byte '!'.

Named in a config as `tests.failing:table_error`; in processes and in Spark's workers alike.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from engine.backend import PackedPrompts
from engine.backends.fake.backend import FakeBackend
from schemas.errors import ConfigError, EngineError, StorageError, TableError
from schemas.settings import EngineSettings


class PanicException(BaseException):  # noqa: N818  # as those of Rust libraries are called
    """A panic, as pyo3 raises it."""


ERRORS: dict[str, BaseException] = {
    "table_error": TableError("users: rows cannot be decoded", got="damage", where="users.parquet"),
    "config_error": ConfigError("k is too large", expected="at most 3", field="task.k"),
    "engine_error": EngineError("the backend gave another number of rows", got="3"),
    "panic": PanicException("index out of bounds\nnote: run with RUST_BACKTRACE=1"),
    "storage_error": StorageError("a file could not be read", where="users.parquet"),
    "lost_host": SystemExit("the host is gone"),
    "broken": RuntimeError("CUDA error: an illegal memory access was encountered"),
}


class _Failing(FakeBackend):
    """Fails at a marked prompt; where a folder is named, as long as a file `fail` is in it.

    With a file `once` there it fails once, and an engine that was `broken` stays so.
    """

    def __init__(self, seed: int, error: str) -> None:
        super().__init__(seed)
        self._error, self._dead = error, False

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Any:
        if self._dead or (bool((prompts.token_ids == 33).any()) and self._fails()):
            self._dead = self._error == "broken"
            raise copy.copy(ERRORS[self._error])  # a shard writes its name into what it raises
        return super().prefill(prompts, max_nodes)

    def _fails(self) -> bool:
        folder = os.environ.get("NIGHTSHELF_TEST_TROUBLE")
        if folder is None:
            return True
        once = Path(folder, "once")
        if once.exists():
            once.unlink()
            return True
        return Path(folder, "fail").exists()


def _named(error: str) -> Any:
    def backend(settings: EngineSettings) -> FakeBackend:
        return _Failing(settings.seed, error)

    return backend


table_error = _named("table_error")
config_error = _named("config_error")
engine_error = _named("engine_error")
panic = _named("panic")
storage_error = _named("storage_error")
broken = _named("broken")
lost_host = _named("lost_host")


class _OnlyOne(_Failing):
    """A device that this process has lost: no second engine starts."""

    started = False

    def __init__(self, seed: int) -> None:
        if _OnlyOne.started:
            raise EngineError("the device does not answer")
        super().__init__(seed, "broken")
        _OnlyOne.started = True


def lost_device(settings: EngineSettings) -> FakeBackend:
    """Breaks for good, in this process."""
    return _OnlyOne(settings.seed)

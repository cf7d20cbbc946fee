"""What a backend says of itself before it starts. Nothing here loads torch or an engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from schemas.errors import EngineError, quoted
from schemas.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """Everything that a plan, a launcher or `doctor` asks about a backend.

    The defaults are those of the smallest backend there is: a callable that reads what it likes.
    """

    name: str
    create: str | Callable[..., Any]
    """`module:callable`, imported by the worker; takes `EngineSettings`, gives a `Backend`."""
    settings: type[Section] | None = None
    """What `engine.options` holds for it; None: it takes no options."""
    packages: tuple[str, ...] = ()
    """Modules without which it cannot be loaded."""
    install: str = "Install its packages, or correct engine.backend."
    """What to do where a package is missing."""
    reads_checkpoint: bool = False
    """`engine.model` is a Hugging Face checkpoint folder, which it needs: config.json, weights and
    tokenizer are looked at before a run."""
    own_forward: bool = False
    """It computes attention and head itself: only plain causal models are right, with tensors of
    the sizes that config.json says."""
    stateless: bool = False
    """Every read sends its prompt again: nothing is kept between calls."""
    native_beams: bool | None = None
    """Whether it has a beam search of its own (`engine.generate.native_beams.NativeBackend`); None:
    known when it has started."""
    starts_processes: bool = False
    """Its engine may start processes, which a daemonic worker may not."""
    gpu: Literal["never", "optional", "needed"] = "optional"
    embedding_width: int | None = None
    """Numbers of an embedding, where that is not the hidden size of the model."""
    checks: str | None = None
    """`module:function` for `doctor`, in a process of its own: takes a model folder or None, and
    gives `schemas.checks.Check`s. None: it is run over a tiny model, if it reads checkpoints."""

    before_a_run: str | None = None
    """`module:function` that a plan asks in a process of its own, where the packages are installed:
    takes `EngineSettings`, yields the `EngineError`s of a checkpoint that would not be loaded."""

    def missing_packages(self) -> Iterator[EngineError]:
        """The error of the first package that this Python lacks; none is imported."""
        for package in self.packages:
            try:
                found = package in sys.modules or find_spec(package) is not None
            except (ImportError, ValueError):
                found = False
            if not found:
                yield self.cannot_load(f"ModuleNotFoundError: No module named {package!r}")
                return

    def cannot_load(self, why: str) -> EngineError:
        """The error of a backend whose packages are not there, or do not load."""
        return EngineError(
            f"backend {quoted(self.name)} cannot be loaded",
            got=why,
            do=self.install,
            field="engine.backend",
        )

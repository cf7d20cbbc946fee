"""What TensorRT-LLM raises, as errors of this project: by type, never by text.

It has few types of its own. At start-up everything is an `EngineError`; later a `RequestError`
concerns one request, and everything else means that the engine may be in any state: the shard
fails, and the launcher replaces the worker and its engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from schemas.errors import EngineError, NightshelfError, ShardFailedError, quoted
from schemas.settings import EngineSettings


@contextmanager
def starting(what: str, settings: EngineSettings) -> Iterator[None]:
    """Whatever is raised inside keeps the engine from starting: `EngineError`."""
    try:
        yield
    except NightshelfError:
        raise
    except Exception as err:  # of any layer below: pydantic, CUDA, MPI, FlashInfer
        do = "Out of memory: set engine.trtllm.max_num_tokens lower, or use a smaller model."
        if settings.dtype == "float32":
            do = "Its kernels compute in bfloat16: set engine.dtype: bfloat16."
        raise EngineError(
            f"TensorRT-LLM cannot start its {what}",
            got=quoted(f"{type(err).__name__}: {err}"),
            where=f"model {settings.model}",
            do=do,
        ) from err


@contextmanager
def running(what: str) -> Iterator[None]:
    """What is raised inside fails the shard. Out of memory passes: the caller packs smaller."""
    try:
        yield
    except (NightshelfError, torch.OutOfMemoryError):
        raise
    except Exception as err:  # the engine may be in any state now
        raise ShardFailedError(
            f"TensorRT-LLM failed to {what}",
            got=quoted(f"{type(err).__name__}: {err}"),
            do="A new worker takes over; see the engine's own log above.",
        ) from err

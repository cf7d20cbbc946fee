"""What this backend says of a checkpoint before a run, in a process that may load torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.weights import load_config, load_problems
from engine.checkpoints.files import checkpoint_problems, loaded_files
from schemas.engine_settings import EngineSettings
from schemas.errors import EngineError

STARTED_BEFORE_A_RUN = 1 << 30  # bytes of weights


def before_a_run(settings: EngineSettings) -> Iterator[EngineError]:
    """Why the backend would not load a checkpoint.

    Headers and config.json are looked at; a small model is started on the CPU, in float32, and
    held against its library as it will be in the run.
    """
    folder = settings.model
    if folder is None or next(checkpoint_problems(folder, own_forward=True), None) is not None:
        return  # said already
    try:
        found = list(load_problems(folder))
        if not found and _is_small(folder):
            TorchBackend(folder, "float32", torch.device("cpu")).close()
    except EngineError as err:
        found = [err]
    yield from found


def _is_small(folder: str) -> bool:
    """Small, and in numbers that every processor can calculate with."""
    if getattr(load_config(folder), "quantization_config", None) is not None:
        return False
    size = sum(path.stat().st_size for path in loaded_files(Path(folder)))
    return size <= STARTED_BEFORE_A_RUN

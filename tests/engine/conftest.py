"""The TensorRT-LLM backend over its double."""

from __future__ import annotations

import pytest

from schemas.settings import EngineSettings, TrtllmSettings


@pytest.fixture
def start(double, model_folder):
    """Start the backend over the double: `start(multi_item="off", …)`."""
    from engine.registry import create_backend

    open_ones = []

    def make(model=None, projector=None, dtype="float32", **trtllm_settings):
        settings = EngineSettings(
            backend="trtllm",
            model=model or model_folder,
            projector=projector,
            dtype=dtype,
            trtllm=TrtllmSettings(**trtllm_settings),
        )
        open_ones.append(create_backend(settings))
        return open_ones[-1]

    yield make
    for backend in open_ones:
        backend.close()

"""TensorRT-LLM's double for the tests of its adapter.

With the library installed they are skipped, because they know the double from within: for the
library there is `pytest tests/conformance --backend trtllm`.
"""

from __future__ import annotations

import pytest

from schemas.settings import EngineSettings, TrtllmSettings
from tests import trtllm


@pytest.fixture
def double():
    """The double's recorder: what was called, and faults to ask for."""
    if trtllm.installed():
        pytest.skip("TensorRT-LLM itself is installed")
    trtllm.use_double()
    from tensorrt_llm import recorder

    recorder.CALLS.clear()
    yield recorder
    recorder.FAULTS.clear()


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

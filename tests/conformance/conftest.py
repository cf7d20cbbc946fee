"""`pytest tests/conformance --backend torch --device cuda --model FOLDER` is a backend's acceptance
test.

Without options the suite runs over `torch` on the CPU, over `trtllm` on the strict double of
TensorRT-LLM, and, for its structural half, over `fake`. `--backend trtllm` is for a GPU machine: it
never takes the double.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.backend import Backend
from engine.backends.registry import create_backend
from schemas.errors import EngineError
from schemas.settings import EngineSettings
from tests import trtllm
from tests.factories import tiny_model


@dataclass(frozen=True)
class Subject:
    """The backend under test, the model behind it, and how near "equal" is."""

    name: str
    backend: Backend
    model: str | None  # None: no oracle, the structural half only
    tolerance: float  # nats, against the oracle
    same: float  # nats, between two ways the backend itself must agree on


@pytest.fixture(scope="session")
def subject(request, model_folder, tmp_path_factory) -> Subject:
    name, device, dtype = request.param
    if name == "fake":
        return Subject("fake", create_backend(EngineSettings(backend="fake")), None, 0.0, 0.0)
    folder = request.config.getoption("--model") or model_folder
    if name == "trtllm_double":
        if trtllm.installed():
            pytest.skip("TensorRT-LLM is installed: use --backend trtllm")
        trtllm.use_double()
        name = "trtllm"
    elif name == "trtllm":
        if not trtllm.installed():
            raise EngineError("TensorRT-LLM is not installed, and its double proves nothing here")
        if request.config.getoption("--model") is None:  # its kernels have a least head width
            folder = tiny_model(tmp_path_factory.mktemp("wide"), hidden=256, head_dim=64)
    settings = EngineSettings(backend=name, model=folder, device=device, dtype=dtype)
    exact = dtype == "float32"
    same = 0.0 if exact and device == "cpu" and name == "torch" else 1e-5 if exact else 0.1
    return Subject(name, create_backend(settings), folder, 1e-5 if exact else 0.5, same)


def pytest_generate_tests(metafunc: Any) -> None:
    if "subject" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    if name := option("--backend"):
        dtype = option("--dtype") or ("bfloat16" if name == "trtllm" else "float32")
        subjects = [(name, option("--device"), dtype)]
    else:
        subjects = [
            ("fake", "cpu", "float32"),
            ("torch", "cpu", "float32"),
            ("trtllm_double", "cpu", "float32"),
        ]
        if torch.cuda.is_available():
            subjects.append(("torch", "cuda", "float32"))
    ids = ["-".join(s) for s in subjects]
    metafunc.parametrize("subject", subjects, ids=ids, indirect=True, scope="session")

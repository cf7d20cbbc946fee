"""`pytest tests/conformance --backend torch --device cuda --model FOLDER` is a backend's acceptance
test.

Without options the suite runs over `torch` on the CPU and, for its structural half, over `fake`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.backend import Backend
from engine.registry import create_backend
from schemas.settings import EngineSettings


@dataclass(frozen=True)
class Subject:
    """The backend under test, the model behind it, and how near "equal" is."""

    name: str
    backend: Backend
    model: str | None  # None: no oracle, the structural half only
    tolerance: float  # nats, against the oracle
    same: float  # nats, between two ways the backend itself must agree on


@pytest.fixture(scope="session")
def subject(request, model_folder) -> Subject:
    name, device, dtype = request.param
    if name == "fake":
        return Subject("fake", create_backend(EngineSettings(backend="fake")), None, 0.0, 0.0)
    folder = request.config.getoption("--model") or model_folder
    settings = EngineSettings(backend=name, model=folder, device=device, dtype=dtype)
    exact = dtype == "float32"
    same = 0.0 if exact and device == "cpu" and name == "torch" else 1e-5 if exact else 0.1
    return Subject(name, create_backend(settings), folder, 1e-5 if exact else 0.5, same)


def pytest_generate_tests(metafunc: Any) -> None:
    if "subject" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    if option("--backend"):
        subjects = [(option("--backend"), option("--device"), option("--dtype"))]
    else:
        subjects = [("fake", "cpu", "float32"), ("torch", "cpu", "float32")]
        if torch.cuda.is_available():
            subjects.append(("torch", "cuda", "float32"))
    ids = ["-".join(s) for s in subjects]
    metafunc.parametrize("subject", subjects, ids=ids, indirect=True, scope="session")

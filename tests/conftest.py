from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from engine.backends.torch.backend import TorchBackend
from tests import trtllm
from tests.factories import tiny_model

torch.set_num_threads(1)  # tests run side by side
# Time never decides a test, and CI draws the same examples each time; elsewhere they are new ones.
settings.register_profile("here", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("here")


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("conformance", "run tests/conformance over one backend")
    group.addoption("--backend", help="name of the backend; default: fake, torch, trtllm's double")
    group.addoption("--device", default="auto", choices=("auto", "cpu", "cuda"))
    group.addoption("--dtype", choices=("float32", "bfloat16"), help="default: what it computes in")
    group.addoption("--model", help="checkpoint folder; default: a tiny random Qwen3")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def torch_backend(model_folder):
    return TorchBackend(model_folder, "float32", torch.device("cpu"))


@pytest.fixture
def double():
    """The recorder of TensorRT-LLM's double: what was called, and faults to ask for.

    With the library installed its tests are skipped, because they know the double from within: for
    the library there is `pytest tests/conformance --backend trtllm`.
    """
    if trtllm.installed():
        pytest.skip("TensorRT-LLM itself is installed")
    trtllm.use_double()
    from tensorrt_llm import recorder

    recorder.CALLS.clear()
    yield recorder
    recorder.FAULTS.clear()
    recorder.CALLS.clear()


@pytest.fixture
def start(double, model_folder):
    """Start the TensorRT-LLM backend over the double: `start(multi_item="off", …)`."""
    from engine.backends.registry import create_backend
    from schemas.settings import EngineSettings, TrtllmSettings

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


@dataclass(frozen=True)
class Finished:
    """A finished `nightshelf` command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.strip().splitlines()[-1])


@pytest.fixture(autouse=True)
def _one_width(monkeypatch):
    """Tables are as wide in every test, whatever runs the tests and wherever."""
    monkeypatch.setenv("COLUMNS", "110")


@pytest.fixture
def nightshelf():
    """Run the command line inside this process: quick; with `run.workers: 0` only."""
    from typer.testing import CliRunner

    from jobs.cli.app import app

    def run(*args: str | Path, check: int | None = 0) -> Finished:
        done = CliRunner().invoke(app, [str(a) for a in args])
        return _checked(Finished(done.exit_code, done.stdout, done.stderr), check)

    return run


@pytest.fixture
def nightshelf_process():
    """Run the command line in a process of its own, as a user would."""

    def run(*args: str | Path, check: int | None = 0) -> Finished:
        done = subprocess.run(
            [sys.executable, "-m", "jobs", *map(str, args)],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=Path(__file__).parents[1],
        )
        return _checked(Finished(done.returncode, done.stdout, done.stderr), check)

    return run


@pytest.fixture
def trouble(tmp_path, monkeypatch):
    """A folder whose files say what the backends of tests/trouble.py and tests/failing.py do."""
    folder = tmp_path / "trouble"
    folder.mkdir()
    monkeypatch.setenv("NIGHTSHELF_TEST_TROUBLE", str(folder))
    return folder


def _checked(result: Finished, check: int | None) -> Finished:
    assert "Traceback" not in result.err, result.err
    if check is not None:
        assert result.code == check, f"exit {result.code}\n{result.out}\n{result.err}"
    return result

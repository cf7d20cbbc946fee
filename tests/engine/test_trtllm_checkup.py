"""The checkup that `nightshelf doctor --backend trtllm` prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.backends.trtllm import checks as module
from engine.backends.trtllm.checks import checkup
from schemas.checks import Check
from tests import trtllm

NAMES = [
    "TensorRT-LLM",
    "packages",
    "GPU",
    "encode engine",
    "scores of transformers",
    "multi-item scoring",
    "two users, one prompt",
    "throughput",
    "native beams",
    "two users, native beams",
]


@pytest.fixture(autouse=True)
def little_work(monkeypatch):
    """The probe of the throughput is sized for a GPU."""
    monkeypatch.setattr(module, "PROBE_TOKENS", 8)
    monkeypatch.setattr(module, "PROBE_ITEMS", 4)


def test_every_check_is_made_and_right_over_the_double(double, model_folder):
    checks = checkup(model_folder, dtype="float32")
    assert [c.name for c in checks] == NAMES
    assert all(isinstance(c, Check) and c.detail for c in checks)
    assert all(c.ok != bool(c.remedy) for c in checks)  # a remedy where something is wrong
    wrong = {c.name for c in checks if not c.ok}
    assert wrong <= {"GPU"}


def test_without_a_model_only_the_machine_is_looked_at(double):
    assert [c.name for c in checkup(None)] == [*NAMES[:3], "model"]


def test_what_is_wrong_with_multi_item_scoring_is_said(double, model_folder):
    double.FAULTS.add("multi_item_refused")
    check = next(c for c in checkup(model_folder, dtype="float32") if c.name == NAMES[5])
    assert not check.ok
    assert "refused" in check.detail


def test_an_engine_that_cannot_start_is_a_check_that_failed(double, tmp_path):
    checks = checkup(str(tmp_path), dtype="float32")
    assert checks[-1].name == "encode engine"
    assert not checks[-1].ok


@pytest.mark.skipif(trtllm.installed(), reason="TensorRT-LLM itself is installed")
def test_without_the_library_it_says_what_to_install():
    code = (
        "from engine.backends.trtllm.checks import checkup\n"
        "first = checkup(None)[0]\n"
        "assert not first.ok and 'nvcr.io/nvidia/tensorrt-llm' in first.remedy, first\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    assert done.returncode == 0

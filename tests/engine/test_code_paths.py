"""The table of code paths says what runs, and what stands in where a machine lacks a piece."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.backends.torch import code_paths
from engine.backends.torch.code_paths import choose

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PIECES = ("compiled", "flash", "prepack")


@pytest.fixture
def machine(monkeypatch):
    """A machine that has some of the pieces; says which it was asked for."""
    asked = []

    def has(*pieces):
        class Steps:
            combine = log_sum = steps = "compiled"

        def find(name, made):
            def found(*_args):
                asked.append(name)
                return made if name in pieces else None

            return found

        monkeypatch.setattr(code_paths, "find_compiled", find("compiled", Steps()))
        monkeypatch.setattr(code_paths, "find_flash", find("flash", "flash"))
        monkeypatch.setattr(code_paths, "find_prepack", find("prepack", "prepack"))
        return asked

    return has


TABLE = {
    (CPU, torch.float32): ((), "attention: padded; layers: library; linear: plain; head: tiles"),
    (CPU, torch.bfloat16): (
        ("prepack",), "attention: padded; layers: fused; linear: prepacked; head: blocks",
    ),
    (CUDA, torch.float32): ((), "attention: padded; layers: library; linear: plain; head: blocks"),
    (CUDA, torch.bfloat16): (
        ("compiled", "flash"),
        "attention: flash; layers: compiled; linear: plain; head: blocks, compiled log-sum-exp",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("device", "dtype"), TABLE)
def test_the_table(machine, device, dtype):
    asked = machine(*PIECES)
    wanted, words = TABLE[device, dtype]
    path = choose(device, dtype, 64)
    assert tuple(asked) == wanted, "nothing is tried that would not be used"
    assert path.described == words
    assert path.independent == (device is CPU and dtype == torch.float32)


@pytest.mark.parametrize("pieces", list(itertools.chain.from_iterable(
    itertools.combinations(PIECES, n) for n in range(len(PIECES)))))  # fmt: skip
def test_what_a_machine_lacks_is_plain(machine, pieces):
    machine(*pieces)
    on_gpu, on_cpu = (choose(device, torch.bfloat16, 64) for device in (CUDA, CPU))
    assert (on_gpu.flash is not None) == ("flash" in pieces)
    assert (on_gpu.compiled is not None) == on_gpu.fused == ("compiled" in pieces)
    assert (on_cpu.prepack is not None) == ("prepack" in pieces)
    assert on_cpu.fused, "which needs nothing of the machine"


def test_a_backend_says_what_runs(torch_backend):
    assert torch_backend.facts.code_path == TABLE[CPU, torch.float32][1]

"""Which GPUs a process is shown, from what a cluster assigned and what the process may use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.device import bind_addresses, gpu_names
from schemas.errors import EngineError


@pytest.mark.parametrize(
    ("addresses", "visible", "names"),
    [
        # Nothing limits the process: addresses are names already.
        (["0"], None, ["0"]),
        (["3", "1"], None, ["3", "1"]),
        (["GPU-aa", "MIG-bb"], None, ["GPU-aa", "MIG-bb"]),
        ([], None, []),
        # Indices count the visible ones.
        (["0"], "2,3", ["2"]),
        (["1"], "2,3", ["3"]),
        (["1"], " 2 , 3 ", ["3"]),
        (["0", "1"], "5,4", ["5", "4"]),
        (["1"], "GPU-aa,GPU-bb", ["GPU-bb"]),
        (["0"], "MIG-GPU-aa/1/0,MIG-GPU-aa/2/0", ["MIG-GPU-aa/1/0"]),
        (["0"], "2,-1,3", ["2"]),
        # UUIDs name themselves, whole or by their beginning.
        (["GPU-aabb"], "GPU-aabb,GPU-ccdd", ["GPU-aabb"]),
        (["GPU-aabb"], "GPU-aa", ["GPU-aabb"]),
        (["MIG-1"], "MIG-0,MIG-1", ["MIG-1"]),
        (["GPU-aabb"], "0,1", ["GPU-aabb"]),
        ([], "0,1", []),
    ],
)
def test_addresses_become_names(addresses, visible, names):
    assert gpu_names(addresses, visible) == names


@pytest.mark.parametrize(
    ("addresses", "visible", "message"),
    [
        (["2"], "2,3", "GPU 2 is not among the visible ones"),  # a physical index: 3 would be taken
        (["0"], "", "GPU 0 is not among the visible ones"),
        (["0"], "-1", "GPU 0 is not among the visible ones"),
        (["1"], "2,-1,3", "index below 1"),
        (["GPU-cc"], "GPU-aa,GPU-bb", "GPU-cc is not among the visible ones"),
        (["GPU-cc"], "", "GPU-cc is not among the visible ones"),
        (["0", "0"], None, "two assigned GPU addresses are one GPU"),
        (["0", "GPU-aa"], "GPU-aa", "two assigned GPU addresses are one GPU"),
    ],
)
def test_addresses_that_lead_nowhere_are_named(addresses, visible, message):
    with pytest.raises(EngineError, match=message):
        gpu_names(addresses, visible)


@pytest.mark.parametrize(("addresses", "shown"), [(("1",), "7"), ((), "-1"), (("0", "1"), "6,7")])
def test_a_process_sees_its_own_gpus_and_no_others(monkeypatch, addresses, shown):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    bind_addresses(addresses)
    import os

    assert os.environ["CUDA_VISIBLE_DEVICES"] == shown


def test_binding_loads_no_torch():
    code = "import sys; from engine.device import bind_addresses as b; b(['0']); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

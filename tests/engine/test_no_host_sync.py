"""The level loop of a beam search never waits for a GPU: nothing in it asks a tensor for a value.

Held on a CPU, with passes laid out as on a GPU. An operator of the list below makes a CUDA stream
wait, because the size of its result, or what Python does next, depends on the data.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.search.best_first import Limits, best_first
from engine.search.masks import Mask
from engine.trees.device_trie import to_device
from engine.trees.search_tree import catalog_tree
from engine.trees.sid_trie import build_trie
from schemas.settings import QuotaSettings
from tests.factories import bound_space, prompts_of, random_codes, random_prompts

CPU = torch.device("cpu")
WAITS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_static",
    "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
}  # fmt: skip


class NoWaiting(TorchDispatchMode):
    """Refuses operators that would make the host wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            by_mask = [i.dtype for i in args[1] if i is not None and i.dtype == torch.bool]
            assert not by_mask, f"{name} by a mask waits for the device"
        if name == "repeat_interleave" and func._overloadname != "self_int":  # by a tensor
            assert (kwargs or {}).get("output_size") is not None, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_waiting(monkeypatch):
    """As on a GPU; and no tensor becomes Python or NumPy behind the dispatcher's back."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("a tensor was read by the host")

    monkeypatch.setattr("engine.backends.torch.passes._on_cpu", lambda context: False)
    monkeypatch.setattr("engine.generate.beam_search._LEAST_ROWS", {"cpu": 1})
    # Behind the levels, between parts of the last one, the host waits once on purpose.
    monkeypatch.setattr(
        "engine.generate.beam_search._indices", lambda chosen: torch.arange(len(chosen))
    )

    def watch():
        for name in ("numpy", "tolist", "cpu", "__array__"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        return NoWaiting()

    yield watch
    monkeypatch.undo()


@pytest.mark.parametrize("prefix", [(), (4, 9, 2)], ids=["no prefix", "prefix"])
@pytest.mark.parametrize("norm", ["full_vocab", "sid_range", "level", "trie"])
@pytest.mark.parametrize("quota", [None, QuotaSettings(level=1, max_items=2)])
def test_the_level_loop_never_waits(torch_backend, no_waiting, prefix, norm, quota):
    rng = np.random.default_rng(4)
    trie = build_trie(random_codes(rng, 60, ragged=True))
    index = to_device(trie, bound_space(), norm, CPU, quota)
    prompts = prompts_of(random_prompts(rng, 6, longest=20), prefix)
    dead = torch.arange(3, 6 * trie.num_nodes, 7)
    everyone = torch.arange(6)
    with torch.inference_mode():
        context = torch_backend.prefill(prompts, 100)
        args = {"prompts": everyone, "widths": (4, 6, 6), "k": 5, "dead": dead}
        want = beam_search(Decoding(torch_backend, context, index), **args)
        context = torch_backend.prefill(prompts, 100)
        watched = no_waiting()
        with watched:
            found = beam_search(Decoding(torch_backend, context, index), **args)
    assert torch.equal(torch.isinf(found.score), torch.isinf(want.score))
    assert torch.nan_to_num(found.score - want.score).abs().max() < 1e-5


@pytest.mark.parametrize("norm", ["full_vocab", "sid_range"])
@pytest.mark.parametrize("quota", [None, QuotaSettings(level=1, max_items=2)])
def test_a_best_first_search_waits_once_a_round(
    torch_backend, no_waiting, monkeypatch, norm, quota
):
    rng = np.random.default_rng(4)
    trie = build_trie(random_codes(rng, 60, ragged=True))
    index = to_device(trie, bound_space(), norm, CPU, quota)
    mask = Mask(torch.arange(6), torch.arange(3, 6 * trie.num_nodes, 7))
    limits = Limits(k=5, first=4, budget=8, detect_flat=True, widths=(4, 4, 4))
    looks, read = [], torch.Tensor.tolist

    def look(tensor):
        looks.append(tensor)
        with _disable_current_modes():
            return read(tensor)

    with torch.inference_mode():
        context = torch_backend.prefill(prompts_of(random_prompts(rng, 6, longest=20)), 100)
        watched = no_waiting()
        monkeypatch.setattr(torch.Tensor, "tolist", look)
        with watched:
            found = best_first(
                Decoding(torch_backend, context, index), catalog_tree(index), mask, limits
            )
    monkeypatch.undo()
    assert found.stopped.any()
    assert len(looks) == int(found.rounds.max()) + 2  # at the roots, and where nothing is left


def test_the_watch_sees_what_waits(no_waiting):
    numbers = torch.arange(4)
    watched = no_waiting()
    for waits in (
        lambda: numbers[numbers > 1],
        lambda: numbers.max().item(),
        lambda: numbers.repeat_interleave(numbers),
        lambda: numbers.nonzero(),
        lambda: numbers.tolist(),
    ):
        with watched, pytest.raises(AssertionError, match="waits for the device|read by the host"):
            waits()

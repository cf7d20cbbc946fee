"""The GPU path, as far as a machine without a GPU can hold it: fused attention computes what plain
attention does, and everything the engine does to a GPU happens there without a wait.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from engine.backend import TokenColumns
from engine.backends.torch import compiled, varlen
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.fused_layers import Steps, use_fused_layers
from engine.backends.torch.varlen import Kernels, combine, find_flash, library_flash, plain, right
from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.prompts.labels import LabelTokens
from engine.scoring.items import score_in_parts
from engine.scoring.labels import label_items
from engine.search.masks import SegmentMask
from engine.trees.device_trie import to_device
from engine.trees.sid_trie import build_trie
from schemas.requests import Ragged
from schemas.settings import QuotaSettings
from tests.engine.fake_cuda import CUDA, fake_cuda, move
from tests.factories import bound_space, prompts_of, random_codes, random_prompts

CPU = torch.device("cpu")
NUM_ITEMS, NUM_USERS = 60, 7
PREFIXES = pytest.mark.parametrize("prefix", [(), (4, 9, 2)], ids=["no prefix", "prefix"])
NORMS = pytest.mark.parametrize("norm", ["full_vocab", "sid_range", "level", "trie"])


class Setting:
    """Users with prompts and candidate sets of many lengths, one of them without candidates."""

    def __init__(self, norm="full_vocab", device=CPU, quota=None):
        rng = np.random.default_rng(4)
        self.trie = build_trie(random_codes(rng, NUM_ITEMS, ragged=True))
        self.index = to_device(self.trie, bound_space(), norm, device, quota)
        self.prompts = random_prompts(rng, NUM_USERS, longest=20)
        counts = [NUM_ITEMS, 0, 1, *rng.integers(1, NUM_ITEMS, NUM_USERS - 3)]
        sets = [rng.choice(NUM_ITEMS, n, replace=False).tolist() for n in counts]
        self.candidates = Ragged.from_lists(sets)
        self.labels = Ragged.from_lists([[0, 2], [1], *[[0, 1, 2]] * (NUM_USERS - 2)])

    def prefill(self, backend, prefix):
        return backend.prefill(prompts_of(self.prompts, prefix), 40)

    def score(self, backend, prefix, max_rows=1000):
        context = self.prefill(backend, prefix)
        return score_in_parts(Decoding(backend, context, self.index), self.candidates, max_rows)[0]

    def label(self, backend, prefix):
        return label_items(
            Decoding(backend, self.prefill(backend, prefix), self.index),
            self.candidates,
            LabelTokens(self.labels, TokenColumns(np.asarray([5, 9, 11])), []),
            suffix=np.asarray([3, 8]),
            softmax=True,
            max_rows=1000,
        )[0]

    def beams(self, backend, prefix):
        """Of all but one of the prompts, some prefixes dead and some closed to a segment."""
        device = self.index.device
        alive = torch.ones((2, self.trie.num_nodes), dtype=torch.bool, device=device)
        alive[1, 5::6] = False
        segments = SegmentMask(alive, torch.arange(NUM_USERS, device=device) % 2)
        return beam_search(
            Decoding(backend, self.prefill(backend, prefix), self.index),
            prompts=torch.arange(1, NUM_USERS, device=device),
            widths=(4, 6, 6),
            k=5,
            dead=torch.arange(3, NUM_USERS * self.trie.num_nodes, 11, device=device),
            segments=segments,
        )


@pytest.fixture
def fused(torch_backend, monkeypatch):
    """The float32 backend with its rows packed as for a fused kernel, and a plain one for it."""
    monkeypatch.setattr("engine.backends.torch.passes._on_cpu", lambda context: False)

    def switch(on):
        path = replace(torch_backend._path, flash=Kernels(plain, combine) if on else None)
        monkeypatch.setattr(torch_backend, "_path", path)
        torch_backend._prefixes.clear()
        return torch_backend

    yield switch
    monkeypatch.undo()
    torch_backend._prefixes.clear()


@PREFIXES
@NORMS
def test_packed_rows_merged_by_log_sum_exp_give_the_same_numbers(fused, norm, prefix):
    it = Setting(norm)
    close = partial(torch.testing.assert_close, rtol=0, atol=2e-5)
    for what in (it.score, partial(it.score, max_rows=9), it.label):
        want = what(fused(False), prefix).nan_to_num(nan=7.0)
        close(what(fused(True), prefix).nan_to_num(nan=7.0), want)
    want, got = it.beams(fused(False), prefix), it.beams(fused(True), prefix)
    close(got.score.nan_to_num(neginf=-99.0), want.score.nan_to_num(neginf=-99.0))
    found = want.score > -torch.inf
    assert found.any() and torch.equal(got.sid[found], want.sid[found])
    for pooling in ("last", "mean"):
        prompts = prompts_of(it.prompts, prefix)
        close(fused(True).embed(prompts, pooling), fused(False).embed(prompts, pooling))


@PREFIXES
def test_a_users_numbers_do_not_depend_on_who_is_packed_beside_it(fused, prefix):
    """A leak across prompts would show: the neighbours are others."""
    it, backend = Setting(), fused(True)
    together = it.score(backend, prefix).split(it.candidates.lengths.tolist())
    it.prompts, it.candidates = it.prompts[::-2], it.candidates.take(np.arange(NUM_USERS)[::-2])
    apart = it.score(backend, prefix).split(it.candidates.lengths.tolist())
    for one, other in zip(apart, together[::-2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def transposed(q, k, v, queries, keys, causal):
    out, log_sum = plain(q, k, v, queries, keys, causal)
    return out, log_sum.flatten().view(log_sum.shape[::-1]).T


def never_causal(q, k, v, queries, keys, causal):
    return plain(q, k, v, queries, keys, False)


def one_sequence(q, k, v, queries, keys, causal):
    return plain(q, k, v, varlen._whole(q), varlen._whole(k), causal)


def heads_interleaved(q, k, v, queries, keys, causal):
    order = torch.arange(q.shape[1]).view(-1, k.shape[1]).T.flatten()
    return plain(q[:, order], k, v, queries, keys, causal)


def test_a_kernel_is_tried_before_it_is_used():
    assert right(plain, CPU, 64)
    for wrong in (transposed, never_causal, one_sequence, heads_interleaved):
        assert not right(wrong, CPU, 64), wrong.__name__


@pytest.fixture
def ampere(monkeypatch):
    """A GPU that has flash attention, whose kernel is to be chosen; its tensors are on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(varlen, "right", lambda kernel, device, width: right(kernel, CPU, width))

    def offer(kernel, width=64):
        monkeypatch.setattr(varlen, "library_flash", kernel)
        return find_flash(CUDA, width)

    return offer


def no_kernel():
    raise ImportError("cannot import name 'varlen_attn'")


def breaks(*_args):
    raise RuntimeError("no kernel image is available for execution on the device")


def test_where_there_is_no_such_kernel_plain_attention_is_used(ampere, monkeypatch, caplog):
    caplog.set_level("INFO", logger="nightshelf.torch")
    assert ampere(lambda: plain) is plain
    assert ampere(lambda: plain, width=512) is None
    assert not caplog.messages
    assert ampere(no_kernel) is None
    assert ampere(lambda: breaks) is None
    assert ampere(lambda: never_causal) is None
    reasons = ("cannot import name", "no kernel image", "does not give what plain code gives")
    for reason, message in zip(reasons, caplog.messages, strict=True):
        assert reason in message
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert ampere(lambda: plain) is None


def all_of_them(chosen):
    """The one place where the host waits on purpose: before the last parts of the last level."""
    return torch.arange(len(chosen), device=chosen.device)


@pytest.fixture
def on_gpu(model_folder, monkeypatch):
    monkeypatch.setattr("engine.backends.torch.code_paths.find_prepack", lambda: None)
    backend = TorchBackend(model_folder, "bfloat16", CPU)
    monkeypatch.setattr("engine.generate.beam_search._indices", all_of_them)
    monkeypatch.setattr(
        "engine.backends.torch.fused_layers._is_plain", lambda norm: True
    )  # at start-up
    with fake_cuda(monkeypatch):
        move(backend, model_folder)
        yield backend


def flash():
    """The library's kernel, whose stand-in for fake tensors does not look at devices and types."""
    kernel = library_flash()

    def strict(q, k, v, queries, keys, causal):
        for tensor in (q, k, v):
            assert tensor.device == CUDA and tensor.dtype == torch.bfloat16
            assert tensor.stride(-1) == 1
        for starts in (queries.starts, keys.starts):
            assert starts.device == CUDA and starts.dtype == torch.int32 and starts.is_contiguous()
        return kernel(q, k, v, queries, keys, causal)

    return strict


@PREFIXES
@NORMS
@pytest.mark.parametrize(
    "kernels", [lambda: Kernels(flash(), combine), lambda: None], ids=["fused", "plain"]
)
def test_everything_happens_on_the_gpu_and_nothing_waits_for_it(on_gpu, kernels, norm, prefix):
    """Shapes, devices and dtypes only: fake tensors hold no numbers."""
    on_gpu._path = replace(on_gpu._path, flash=kernels())
    if on_gpu._path.flash is not None:
        steps = Steps(compiled.norm, compiled.turned, compiled.gated)
        on_gpu._skips = use_fused_layers(on_gpu._body, steps)
    it = Setting(norm, CUDA, QuotaSettings(level=1, max_items=2))
    num_candidates = len(it.candidates.values)
    for what, shape in (
        (partial(it.score, on_gpu, prefix), (num_candidates,)),
        (partial(it.label, on_gpu, prefix), (num_candidates, 3)),
        (lambda: it.beams(on_gpu, prefix).score, (NUM_USERS - 1, 5)),
        (lambda: on_gpu.embed(prompts_of(it.prompts, prefix), "mean"), (NUM_USERS, 32)),
    ):
        made = what()
        assert made.device == CUDA and made.dtype == torch.float32 and made.shape == shape


def test_the_fake_gpu_sees_what_waits_and_what_was_left_on_the_host(on_gpu):
    numbers = torch.arange(4, device=CUDA)
    with pytest.raises(DataDependentOutputException):
        numbers.max().item()
    with pytest.raises(RuntimeError, match="device"):
        numbers + torch.arange(4)
    host = torch.arange(4)
    for copy in (numbers.cpu, lambda: host.copy_(numbers)):
        with pytest.raises(AssertionError, match="waits for the device"):
            copy()

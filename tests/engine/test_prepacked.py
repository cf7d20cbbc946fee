"""Weights prepacked for a CPU compute what plain layers do, and are tried before they are used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from engine.backend import Norm, Targets, TokenColumns
from engine.backends.torch import head as head_module
from engine.backends.torch import prepacked
from engine.backends.torch.head import Head
from engine.backends.torch.prepacked import find_prepack, plain, prepack_layers, right

CPU = torch.device("cpu")


def test_plain_layers_pass_the_trial_and_wrong_ones_do_not():
    assert right(plain)
    assert not right(lambda weight, bias: plain(weight, None)), "without its bias"
    assert not right(lambda weight, bias: plain(1.2 * weight, bias))
    assert not right(lambda weight, bias: lambda x: plain(weight, bias)(x).float())


def test_what_fails_or_disagrees_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(prepacked, "prepacked", lambda weight, bias: plain(2 * weight, bias))
    assert find_prepack() is None

    def lacking(weight, bias):
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(prepacked, "prepacked", lacking)
    assert find_prepack() is None
    assert "prepacked weights: not used, it does not give" in caplog.messages[0]
    assert "_linear_pointwise" in caplog.messages[1]


@pytest.fixture
def prepack():
    found = find_prepack()
    if found is None:  # an ARM machine, or an x86 one without bfloat16
        pytest.skip("this machine has no operator that prepacks weights")
    return found


def test_layers_keep_their_results_and_drop_their_plain_weights(prepack):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 40), nn.SiLU(), nn.Linear(40, 33, bias=False))
    model.to(torch.bfloat16)
    x = torch.randn(1, 7, 48, dtype=torch.bfloat16)
    with torch.inference_mode():
        want = model(x)
        prepack_layers(model, prepack)
        torch.testing.assert_close(model(x), want, rtol=0.02, atol=0.02)
    assert model[0].weight.numel() == model[2].weight.numel() == 0


@pytest.mark.parametrize("bias", [False, True])
def test_the_head_normalises_as_before(prepack, bias, monkeypatch):
    monkeypatch.setitem(head_module._COLUMNS, "cpu", 32)  # more than one block, the last narrower
    monkeypatch.setattr("engine.backends.torch.wide_logits._FEW", 20)
    torch.manual_seed(0)
    layer = nn.Linear(24, 75, bias=bias).to(torch.bfloat16)
    hidden = torch.randn(6, 24).to(torch.bfloat16)
    targets = Targets(
        row=torch.arange(6), column=torch.arange(6), columns=TokenColumns(np.arange(20))
    )
    with torch.inference_mode():
        want = torch.log_softmax(layer(hidden).float(), dim=-1).diagonal()[:6]
        for chosen in (None, prepack):
            head = Head(layer, independent=False, prepack=chosen)
            got = head.log_probs(hidden, targets, Norm("full_vocab"))
            torch.testing.assert_close(got, want, rtol=0, atol=0.03)


def test_logits_that_tower_over_the_first_block_are_summed_the_long_way(monkeypatch):
    """Relative to the first block's largest they are beyond what float32 holds."""
    monkeypatch.setitem(head_module._COLUMNS, "cpu", 4)
    monkeypatch.setattr("engine.backends.torch.wide_logits._FEW", 4)
    layer = nn.Linear(1, 12, bias=False).to(torch.bfloat16)
    layer.weight.data = torch.tensor([1.0] * 8 + [200.0] * 4).to(torch.bfloat16)[:, None]
    hidden = torch.tensor([[1.0], [0.0], [torch.nan], [-1.0]]).to(torch.bfloat16)
    targets = Targets(
        row=torch.arange(4),
        column=torch.zeros(4, dtype=torch.int64),
        columns=TokenColumns(np.zeros(1, dtype=np.int64)),
    )
    with torch.inference_mode():
        got = Head(layer, independent=False).log_probs(hidden, targets, Norm("full_vocab"))
        want = torch.log_softmax(layer(hidden).float(), dim=-1)[:, 0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3, equal_nan=True)

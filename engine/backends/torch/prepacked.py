"""Weights prepacked for a CPU's matrix units, once, at start-up; bfloat16.

PyTorch's matmul on a CPU copies a weight into the tiles that its kernel reads, in every call.
oneDNN takes weights that lie so already. PyTorch has operators for it, which its own compiler uses
and no document promises: they are tried at start-up against plain arithmetic, and where they are
missing or disagree the plain layers stay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.backends.torch.capability import tried

_CLOSE = 0.05  # bfloat16 against float32, of values about 1

Linear = Callable[[Tensor], Tensor]
Prepack = Callable[[Tensor, Tensor | None], Linear]
"""From a weight `[out, in]` and a bias `[out]` to the layer `[..., in] -> [..., out]`."""


def find_prepack() -> Prepack | None:
    """How to prepack weights where this machine can and it computes what it should, else None."""
    return tried("prepacked weights", lambda: prepacked, right)


def prepacked(weight: Tensor, bias: Tensor | None) -> Linear:
    """A linear layer that owns a copy of its weight."""
    ops: Any = torch.ops.mkldnn  # operators without types
    tiles, layer = ops._reorder_linear_weight(weight.detach(), None), ops._linear_pointwise.default
    return lambda x: layer(x, tiles, bias, "none", [], "")


@torch.inference_mode()
def right(prepack: Prepack) -> bool:
    """Whether it agrees with the plain layer: with a bias and without, odd sizes and strides."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise).to(torch.bfloat16)

    for rows, width, columns in ((1, 16, 8), (5, 40, 33), (130, 64, 96)):
        weight = random(columns, width) * width**-0.5
        wide, across = random(1, rows, width), random(width, rows).T
        for bias in (None, random(columns)):
            layer = prepack(weight, bias)
            for x in (wide, wide[0], across):
                want = functional.linear(
                    x.float(), weight.float(), None if bias is None else bias.float()
                )
                got = layer(x)
                if got.dtype != x.dtype or not torch.allclose(
                    got.float(), want, rtol=_CLOSE, atol=_CLOSE
                ):
                    return False
    return True


def plain(weight: Tensor, bias: Tensor | None) -> Linear:
    """The library's layer, which holds the weight it was given."""
    return partial(functional.linear, weight=weight, bias=bias)


def prepack_layers(model: nn.Module, prepack: Prepack) -> None:
    """Lay out the linear layers of `model` one by one, and drop their plain weights."""
    for module in model.modules():
        if type(module) is nn.Linear:
            layer: Any = module
            layer.forward = prepack(layer.weight, layer.bias)
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

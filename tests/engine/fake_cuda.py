"""CUDA tensors without numbers and without CUDA, to run the engine's GPU path where there is none.

`FakeTensorMode` checks that the operands of each operator are on one device, works out shapes, and
refuses whatever reads a value; we refuse copies from the GPU to the host too. A torch built without
CUDA stumbles over a few methods of such tensors that are written in C++; here they go straight to
their operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.head import Head
from engine.backends.torch.model import head_of

CUDA = torch.device("cuda", 0)
_ops: Any = torch.ops.aten


class _NoWayBack(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        source = {"_to_copy": args[:1], "copy_": args[1:2]}.get(name, ())
        for tensor in source:
            assert out.device == CUDA or tensor.device != CUDA, f"{name} waits for the device"
        return out


@contextmanager
def fake_cuda(monkeypatch: Any) -> Iterator[None]:
    """All tensors made inside are fake; those on `CUDA` stay there."""
    methods = {
        "__getitem__": _get,
        "__setitem__": _set,
        "__invert__": lambda x: _ops.bitwise_not.default(x),
        "isnan": lambda x: _ops.ne.Tensor(x, x),
        "contiguous": lambda x: _ops.clone.default(x, memory_format=torch.contiguous_format),
    }
    with FakeTensorMode(), _NoWayBack(), monkeypatch.context() as patch:
        for name, method in methods.items():
            patch.setattr(torch.Tensor, name, method)
        yield


def move(backend: TorchBackend, folder: str) -> None:
    """Put a bfloat16 backend on the fake GPU, its model as the library wrote it."""
    for module in backend._model.modules():
        module.__dict__.pop("forward", None)
        for kind in (module._parameters, module._buffers):
            for name, tensor in list(kind.items()):
                if tensor is not None:
                    kind[name] = _like(tensor)
    backend._embed = backend._model.get_input_embeddings()
    backend._head = Head(head_of(backend._model, folder), independent=False)
    backend._facts = replace(backend._facts, device=CUDA)
    backend._skips = False


def _like(tensor: Tensor) -> Any:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def _view(x: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """What the ints, slices and Nones of `x[key]` select, and its tensors by dimension."""
    keys = list(key) if isinstance(key, tuple) else [key]
    where = [i for i, k in enumerate(keys) if k is Ellipsis]
    if where:
        named = sum(k is not None and k is not Ellipsis for k in keys)
        keys[where[0] : where[0] + 1] = [slice(None)] * (x.dim() - named)
    at, tensors = 0, {}
    for k in keys:
        if isinstance(k, int):
            x = _ops.select.int(x, at, k)
            continue
        if k is None:
            x = _ops.unsqueeze.default(x, at)
        elif isinstance(k, Tensor):
            tensors[at] = k
        elif k != slice(None):
            x = _ops.slice.Tensor(x, at, k.start, k.stop, k.step or 1)
        at += 1
    return x, [tensors.get(i) for i in range(max(tensors, default=-1) + 1)]


def _get(x: Tensor, key: Any) -> Tensor:
    x, tensors = _view(x, key)
    return _ops.index.Tensor(x, tensors) if tensors else x


def _set(x: Tensor, key: Any, value: Any) -> None:
    x, tensors = _view(x, key)
    if not isinstance(value, Tensor):
        value = _ops.full.default([], value, dtype=x.dtype, device=x.device)
    if tensors:
        _ops.index_put_.default(x, tensors, value)
    else:
        _ops.copy_.default(x, value)

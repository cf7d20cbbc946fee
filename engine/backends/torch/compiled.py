"""On CUDA in bfloat16: what stands between the matmuls as one kernel each, by `torch.compile`.

A pack fills the GPU with tens of thousands of rows, so that starting kernels costs little and what
they read and write costs much: a norm or a rotary embedding written out takes half a dozen passes
over the rows, a compiled one takes one. Rows are a dynamic size: each function is compiled for the
first size and once more for any size; the merge for each number of ancestors, and past PyTorch's
limit of such variants it runs as it is written.

Legend: T rows, N heads, D head width, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch.nn import functional

from engine.backends.torch import varlen
from engine.backends.torch.capability import tried
from engine.backends.torch.fused_layers import Steps
from engine.backends.torch.varlen import Combine, Nodes

_CLOSE = 0.05  # bfloat16 against float32, of values about 1


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm `[..., D]`."""
    return (_scaled(x.float(), eps)).to(x.dtype) * weight


def turned(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `[T, N, D]`, normed where there is a weight, and rotated by cos and sin `[T, 1, D]`."""
    wide = x.float()
    if weight is not None:
        wide = _scaled(wide, eps) * weight
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return (functional.silu(gate.float()) * up).to(gate.dtype)


def log_sum(logits: Tensor) -> Tensor:
    """Log-sum-exp of each row `[R, C] -> [R]`, float32."""
    return logits.float().logsumexp(dim=-1)


def _scaled(wide: Tensor, eps: float) -> Tensor:
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel each."""

    steps: Steps
    log_sum: Callable[[Tensor], Tensor]
    combine: Combine


def find_compiled(device: torch.device) -> Compiled | None:
    """The kernels where this machine can make them and they compute what they should, else None."""
    return tried("compiled steps", compiled, lambda made: right(made, device))


def compiled(backend: str = "inductor") -> Compiled:
    """Not compiled yet: that happens at the first call of each."""
    make: Any = torch.compile
    inductor.compile_threads = 1  # a few small kernels are no work for a pool of processes
    a, b, c, d, e = (
        make(step, backend=backend) for step in (norm, turned, gated, log_sum, varlen.combine)
    )
    return Compiled(Steps(a, b, c), d, e)


@torch.inference_mode()  # as the engine runs: compiled code of another mode would not be used again
def right(made: Compiled, device: torch.device) -> bool:
    """Whether they agree with the plain functions, at two numbers of rows."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise).to(device, torch.bfloat16)

    for rows in (5, 9):
        keys, values = random(20, 3, 16), random(20, 3, 16)
        at = torch.arange(2 * rows, device=device).view(rows, 2)
        q, parts = random(rows, 6, 16), [(random(rows, 6, 16), random(rows, 6).float())]
        x, heads, cos, sin = random(rows, 64), random(rows, 3, 16), *random(2, rows, 1, 16).float()
        cases: list[tuple[Any, Any, tuple[Any, ...]]] = [
            (made.steps.norm, norm, (x, random(64), 1e-6)),
            (made.steps.turned, turned, (heads, random(16), 1e-6, cos, sin)),
            (made.steps.turned, turned, (heads, None, 1e-6, cos, sin)),
            (made.steps.gated, gated, (x, random(rows, 64))),
            (made.log_sum, log_sum, (x,)),
            (made.combine, varlen.combine, (q, 2 * parts, None)),
            (made.combine, varlen.combine, (q, parts, Nodes(keys, values, at, at % 3 > 0))),
        ]
        for got, plain, given in cases:
            wide = [a.float() if isinstance(a, Tensor) else a for a in given]
            want = plain(*wide)
            if not torch.allclose(got(*given).float(), want, rtol=_CLOSE, atol=_CLOSE):
                return False
    return True

"""Which code runs: device x precision -> attention, layers, linear layers and head; chosen here.

| device | dtype | attention | layers | linear | head |
|---|---|---|---|---|---|
| cpu | float32 | padded | library | plain | tiles: a row's bits are its own |
| cpu | bfloat16 | padded | fused | prepacked | blocks that stay in the cache |
| cuda | float32 | padded | library | plain | blocks |
| cuda | bfloat16 | flash | compiled | plain | blocks, compiled log-sum-exp |

Pieces that a machine may lack (flash attention, compiled steps, prepacked weights) are tried at
start-up against plain arithmetic (`capability.py`); where one is missing or wrong, the plain piece
stands in for it, and `CodePath.described` says so.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from engine.backends.torch.compiled import Compiled, find_compiled
from engine.backends.torch.prepacked import Prepack, find_prepack
from engine.backends.torch.varlen import Kernels, combine, find_flash

log = logging.getLogger("nightshelf.torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePath:
    """The pieces that a backend runs with."""

    device: str
    dtype: torch.dtype
    independent: bool  # a row's bits do not depend on what shares its batch
    fused: bool  # the library's norms, attention and MLPs get our forward
    flash: Kernels | None
    compiled: Compiled | None
    prepack: Prepack | None  # how weights are prepacked

    @property
    def described(self) -> str:
        """The pieces, in words."""
        layers = "library" if not self.fused else "fused" if self.compiled is None else "compiled"
        head = "tiles" if self.independent else "blocks"
        if self.compiled is not None:
            head += ", compiled log-sum-exp"
        return (
            f"attention: {'padded' if self.flash is None else 'flash'}; layers: {layers}; "
            f"linear: {'plain' if self.prepack is None else 'prepacked'}; head: {head}"
        )


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> CodePath:
    """The code path of a model on this machine.

    Args:
        head_dim: width of an attention head.
    """
    low = dtype == torch.bfloat16
    on_cpu, on_cuda = device.type == "cpu", device.type == "cuda"
    compiled = find_compiled(device) if on_cuda and low else None
    flash = find_flash(device, head_dim) if on_cuda and low else None
    kernels = None
    if flash is not None:
        kernels = Kernels(flash, combine if compiled is None else compiled.combine)
    path = CodePath(
        device=device.type,
        dtype=dtype,
        independent=on_cpu and not low,
        fused=(on_cpu and low) or compiled is not None,
        flash=kernels,
        compiled=compiled,
        prepack=find_prepack() if on_cpu and low else None,
    )
    log.info("%s, %s: %s", device.type, str(dtype).removeprefix("torch."), path.described)
    return path

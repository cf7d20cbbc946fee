"""What the machine can do: the bare matmuls of a pass, and the speed of its memory.

The limit of a pass is the time of the model's own linear layers at the pass's own row counts, and
of the head at the rows and columns that are read: nothing else. No attention, norm, rotary
embedding, softmax, padding, copy or host work, and no allocation: outputs go to one buffer. The
head is cut into the blocks of columns that are the fastest of those tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.watched import PHASES, Passes, synchronise

_BLOCKS = {"cpu": (1024, 2048, 4096, 16_384), "cuda": (16_384, 65_536)}  # columns of the head
_COPY_BYTES = 1 << 28  # several times larger than any cache
_PEAK = (2048, 2048, 6144)  # rows, inputs and outputs of a large matmul


class Limit:
    """The bare matmuls of one pass of the engine."""

    def __init__(self, model: PreTrainedModel, passes: Passes) -> None:
        head: nn.Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # the library's
        self._head = head.weight.detach()
        self._device = self._head.device
        body: Any = model.base_model
        self._layers = [m.weight.detach() for m in body.modules() if isinstance(m, nn.Linear)]
        self._passes = passes
        weights = [*self._layers, self._head]
        body_rows = max([0, *passes.prefill, *passes.tree])
        head_rows = max([0, *(rows for rows, _ in passes.head)])
        most = max(1, body_rows, head_rows)
        self._blocks = _BLOCKS[self._device.type]
        self._rows = {w: torch.randn(most, w).to(self._head) for w in {m.shape[1] for m in weights}}
        widest = max(w.shape[0] for w in self._layers)
        size = max(most * widest, head_rows * max(self._blocks), 1)
        self._out = torch.empty(size, dtype=self._head.dtype, device=self._device)
        self._block = min(self._blocks, key=self._seconds_of_block)

    @torch.inference_mode()
    def __call__(self) -> dict[str, float]:
        """Multiply; seconds of each phase and of the `whole`."""
        seconds = {
            "prefill": self._timed(lambda: self._run_layers(self._passes.prefill)),
            "tree": self._timed(lambda: self._run_layers(self._passes.tree)),
            "head": self._timed(lambda: self._run_head(self._passes.head, self._block)),
        }
        return seconds | {"whole": sum(seconds.values())}

    def flops(self) -> dict[str, int]:
        """Floating-point operations of each phase, two for a multiplication and its addition."""
        layer = 2 * sum(w.numel() for w in self._layers)
        width = self._head.shape[1]
        found = {
            "prefill": layer * sum(self._passes.prefill),
            "tree": layer * sum(self._passes.tree),
            "head": 2 * width * sum(rows * columns for rows, columns in self._passes.head),
        }
        return found | {"whole": sum(found[phase] for phase in PHASES)}

    def _run_layers(self, passes: list[int]) -> None:
        for rows in passes:
            for weight in self._layers:
                self._multiply(rows, weight)

    def _run_head(self, passes: list[tuple[int, int]], block: int) -> None:
        for rows, columns in passes:
            for begin in range(0, columns, block):
                self._multiply(rows, self._head[begin : min(begin + block, columns)])

    def _multiply(self, rows: int, weight: Tensor) -> None:
        x = self._rows[weight.shape[1]][:rows]
        out = self._out[: rows * weight.shape[0]].view(rows, weight.shape[0])
        torch.mm(x, weight.t(), out=out)

    def _timed(self, work: Callable[[], None]) -> float:
        return _seconds(work, self._device)

    @torch.inference_mode()
    def _seconds_of_block(self, block: int) -> float:
        """Seconds of the widest read in blocks of so many columns; the best of three tries."""
        if not self._passes.head:
            return 0.0
        widest = [max(self._passes.head, key=lambda p: p[0] * p[1])]
        return min(self._timed(lambda: self._run_head(widest, block)) for _ in range(3))


def memory_bandwidth(device: torch.device) -> float:
    """GB/s of a streaming copy, bytes read and bytes written counted; the best of a few."""
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    best = min(_seconds(lambda: target.copy_(source), device) for _ in range(5))
    return 2 * _COPY_BYTES / best / 1e9


@torch.inference_mode()
def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """GFLOP/s of one large matmul; the best of a few."""
    rows, inputs, outputs = _PEAK
    x = torch.randn(rows, inputs).to(device, dtype)
    weight = torch.randn(outputs, inputs).to(device, dtype)
    out = torch.empty(rows, outputs, dtype=dtype, device=device)
    best = min(_seconds(lambda: torch.mm(x, weight.t(), out=out), device) for _ in range(5))
    return 2 * rows * inputs * outputs / best / 1e9


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start

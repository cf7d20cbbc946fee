"""What the machine can do: the bare matmuls of a pass, and the speed of its memory.

The limit of a pass is the time of the model's own linear layers at the pass's own row counts, and
of the head at the rows and columns that are read: nothing else. Of a prompt's last layer only keys
and values are needed of each token, and the rest of the last one. No attention, norm, rotary
embedding, softmax, padding, copy or host work, and no allocation: outputs go to one buffer. The
head is cut into the blocks of columns that are the fastest of those tried.

On a CPU the engine lays its weights out for the matrix units before it starts, which PyTorch's own
layers do in every call. The bare matmuls with weights laid out are a second, stricter limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.watched import PHASES, Passes, synchronise
from engine.backends.torch.prepacked import Linear, Prepack

_BLOCKS = {"cpu": (1024, 2048, 4096, 16_384), "cuda": (16_384, 65_536)}  # columns of the head
_LAID_OUT_BLOCKS = (2048,)  # the engine's
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_COPY_BYTES = 1 << 28  # several times larger than any cache
_PEAK = (2048, 2048, 6144)  # rows, inputs and outputs of a large matmul


class Limit:
    """The bare matmuls of one pass of the engine."""

    def __init__(
        self, model: PreTrainedModel, passes: Passes, prepack: Prepack | None = None
    ) -> None:
        """With `prepack`, weights are laid out, now, and outputs are allocated by the operator."""
        head: nn.Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # the library's
        self._head = head.weight.detach()
        self._device = self._head.device
        body: Any = model.base_model
        self._layers = [m.weight for m in _linear(body).values()]
        self._at_ends = [  # of the last layer, what a prompt needs at its end only
            m.weight
            for name, m in _linear(body.layers[-1]).items()
            if not name.endswith(_KEYS_AND_VALUES)
        ]
        self._passes = passes
        weights = [*self._layers, self._head]
        body_rows = max([0, *(rows for rows, _ in passes.prefill), *passes.tree])
        head_rows = max([0, *(rows for rows, _ in passes.head)])
        most = max(1, body_rows, head_rows)
        self._lay_out = prepack
        self._laid_out: dict[tuple[int, int], Linear] = {}
        self._blocks = _BLOCKS[self._device.type] if prepack is None else _LAID_OUT_BLOCKS
        self._rows = {w: torch.randn(most, w).to(self._head) for w in {m.shape[1] for m in weights}}
        widest = max(w.shape[0] for w in self._layers)
        size = max(most * widest, head_rows * max(self._blocks), 1)
        self._out = torch.empty(size, dtype=self._head.dtype, device=self._device)
        self._block = min(self._blocks, key=self._seconds_of_block)
        if prepack is not None:
            self()

    @torch.inference_mode()
    def __call__(self) -> dict[str, float]:
        """Multiply; seconds of each phase and of the `whole`."""
        seconds = {
            "prefill": self._timed(self._run_prompts),
            "tree": self._timed(self._run_nodes),
            "head": self._timed(lambda: self._run_head(self._passes.head, self._block)),
        }
        return seconds | {"whole": sum(seconds.values())}

    def flops(self) -> dict[str, int]:
        """Floating-point operations of each phase, two for a multiplication and its addition."""
        layers = 2 * sum(w.numel() for w in self._layers)
        at_ends = 2 * sum(w.numel() for w in self._at_ends)
        width = self._head.shape[1]
        found = {
            "prefill": sum(
                (layers - at_ends) * rows + at_ends * prompts
                for rows, prompts in self._passes.prefill
            ),
            "tree": layers * sum(self._passes.tree),
            "head": 2 * width * sum(rows * columns for rows, columns in self._passes.head),
        }
        return found | {"whole": sum(found[phase] for phase in PHASES)}

    def _run_prompts(self) -> None:
        at_ends = {id(weight) for weight in self._at_ends}
        for rows, prompts in self._passes.prefill:
            for weight in self._layers:
                self._multiply(prompts if id(weight) in at_ends else rows, weight)

    def _run_nodes(self) -> None:
        for rows in self._passes.tree:
            for weight in self._layers:
                self._multiply(rows, weight)

    def _run_head(self, passes: list[tuple[int, int]], block: int) -> None:
        for rows, columns in passes:
            for begin in range(0, columns, block):
                self._multiply(rows, self._head[begin : min(begin + block, columns)])

    def _multiply(self, rows: int, weight: Tensor) -> None:
        x = self._rows[weight.shape[1]][:rows]
        if self._lay_out is not None:
            key = (weight.data_ptr(), len(weight))
            if key not in self._laid_out:
                self._laid_out[key] = self._lay_out(weight, None)
            self._laid_out[key](x)
            return
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


def _linear(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}


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

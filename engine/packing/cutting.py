"""Packs cut until the device's memory holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from engine.packing.preparation import Prepared
from schemas.requests import Ints

T = TypeVar("T")
_LEAST_ROWS = 256  # below this it is not the pack that does not fit


class Cutter:
    """Cuts the packs of one shard after another.

    What did not fit is remembered for the rest of its shard and no longer: what an earlier shard
    met in this process must not change how a later one is cut.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._too_large: dict[int, int] = {}  # by rows at a time: cost of a pack that did not fit

    def forget(self) -> None:
        """A new shard begins."""
        self._too_large.clear()

    def cut(
        self, work: Callable[[Prepared, Ints, int], T], prepared: Prepared, pack: Ints, rows: int
    ) -> list[T]:
        """Work on the pack with so many `rows` at a time, or, where memory does not hold it, on its
        halves in turn with half as many.
        """
        distinct = np.unique(prepared.same_as[pack])
        cost = int(prepared.cost[distinct].sum())
        last = len(pack) == 1 and rows <= _LEAST_ROWS
        if last or cost < self._too_large.get(rows, cost + 1):
            try:
                return [work(prepared, pack, rows)]
            except torch.OutOfMemoryError:
                if last:
                    raise
            self._too_large[rows] = cost
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # of what the failed attempt held
        fewer = max(_LEAST_ROWS, rows // 2)
        halves = [part for part in np.array_split(pack, 2) if len(part)]
        return [one for half in halves for one in self.cut(work, prepared, half, fewer)]

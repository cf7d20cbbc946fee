"""Diversity inside the beam: the number of an entry among the better ones of its group.

A list may hold only so many items that share their first codes (`task.quota`). If that were applied
to finished lists, a beam could spend its whole width on one prefix and leave a list short; so it is
applied where beams and results are selected.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def place_in_group(sort_key: Tensor, group: Tensor) -> Tensor:
    """How many entries of the same row and group have a larger key; all `[B, M]`."""
    best_first = sort_key.argsort(dim=1, descending=True)
    ordered, by_group = group.gather(1, best_first).sort(dim=1, stable=True)
    first = torch.searchsorted(ordered, ordered)
    place = torch.arange(group.shape[1], device=group.device) - first
    return torch.empty_like(place).scatter(1, best_first.gather(1, by_group), place)


def beams_per_group(width: int, k: int, max_items: int) -> int:
    """Beams of `width` that one group may hold: its share, when k items need so many groups."""
    return max(1, width // math.ceil(k / max_items))

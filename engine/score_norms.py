"""Normalisers shared by backends: a softmax over each row's own targets, and log-sum-exp over
columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backend import Targets


def log_softmax_of_targets(logits: Tensor, targets: Targets, num_rows: int) -> Tensor:
    """Log-softmax of `logits` `[M]` over the real targets of each row `[M]` (`score_norm: trie`).

    A row's only target gets exactly 0: a forced token is free.
    """
    row = targets.row
    if targets.real is not None:
        logits = torch.where(targets.real, logits, -torch.inf)
    top = logits.new_full((num_rows,), -torch.inf).scatter_reduce(0, row, logits, "amax")
    top = torch.where(top == -torch.inf, 0.0, top)  # a row without targets
    total = logits.new_zeros(num_rows).index_add(0, row, (logits - top[row]).exp())
    return (logits - top[row] - total.log()[row]).clamp(max=0.0)


def subtract_normaliser(logits: Tensor, normaliser: Tensor, row: Tensor) -> Tensor:
    """`logits - normaliser[row]` `[M]`, never above 0: rounding must not beat a certificate."""
    return (logits - normaliser[row]).clamp(max=0.0)

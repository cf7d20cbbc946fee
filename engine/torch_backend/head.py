"""The LM head, on demand: only the rows that are read, only the columns that are needed.

The normaliser over the whole vocabulary is a running log-sum-exp over chunks of the head; `[rows,
vocab]` is never held.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.backend import Norm, Targets, TokenColumns
from engine.row_tiles import pad_rows
from engine.score_norms import log_softmax_of_targets, subtract_normaliser

_ROWS = 2048  # of one chunk of logits
_COLUMNS = {"cpu": 2048, "cuda": 16384}  # a chunk that stays in a CPU's cache; one that fills a GPU


class Head:
    """Log-probabilities from hidden states."""

    def __init__(self, head: nn.Linear, *, independent: bool) -> None:
        self._independent = independent  # pad rows so that a row's bits are its own
        self._weight = head.weight
        self._bias = head.bias
        self._parts: WeakKeyDictionary[TokenColumns, tuple[Tensor, Tensor | None]] = (
            WeakKeyDictionary()
        )

    def log_probs(self, hidden: Tensor, targets: Targets, norm: Norm) -> Tensor:
        """Log-probabilities `[M]` of targets whose rows index `hidden` `[R, hidden]`."""
        num_rows = len(hidden)
        if self._independent:
            hidden = pad_rows(hidden)
        logits = self._target_logits(hidden, targets)
        if norm.kind == "trie":
            return log_softmax_of_targets(logits, targets, num_rows)
        if norm.kind == "full_vocab":
            normaliser = self._log_sum(hidden, self._weight, self._bias)
        else:
            assert norm.columns is not None, f"norm {norm.kind} needs its columns"
            normaliser = self._log_sum(hidden, *self._part(norm.columns))
        return subtract_normaliser(logits, normaliser, targets.row)

    def _part(self, columns: TokenColumns) -> tuple[Tensor, Tensor | None]:
        """The head's rows for these tokens: a view where ids are contiguous, else one copy."""
        if columns not in self._parts:
            ids = columns.token_ids
            if (np.diff(ids) == 1).all():
                at: slice | Tensor = slice(int(ids[0]), int(ids[-1]) + 1)
            else:
                at = torch.from_numpy(ids).to(self._weight.device)
            bias = None if self._bias is None else self._bias[at]
            self._parts[columns] = (self._weight[at], bias)
        return self._parts[columns]

    def _target_logits(self, hidden: Tensor, targets: Targets) -> Tensor:
        weight, bias = self._part(targets.columns)
        if len(hidden) <= _ROWS:
            logits = functional.linear(hidden, weight, bias).float()
            return logits[targets.row, targets.column]
        out = []
        starts = torch.arange(0, len(hidden), _ROWS, device=hidden.device)
        bounds = torch.searchsorted(targets.row, starts).tolist() + [len(targets.row)]
        for i, begin in enumerate(starts.tolist()):
            part = slice(bounds[i], bounds[i + 1])
            logits = functional.linear(hidden[begin : begin + _ROWS], weight, bias).float()
            out.append(logits[targets.row[part] - begin, targets.column[part]])
        return torch.cat(out)

    @staticmethod
    def _log_sum(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Log-sum-exp of each row's logits `[R]`, float32."""
        out = []
        for first in range(0, len(hidden), _ROWS):
            rows = hidden[first : first + _ROWS]
            total = torch.full((len(rows),), -torch.inf, device=hidden.device)
            step = _COLUMNS[hidden.device.type]
            for begin in range(0, len(weight), step):
                part = slice(begin, begin + step)
                some_bias = None if bias is None else bias[part]
                logits = functional.linear(rows, weight[part], some_bias).float()
                total = torch.logaddexp(total, logits.logsumexp(dim=-1))
            out.append(total)
        return torch.cat(out)

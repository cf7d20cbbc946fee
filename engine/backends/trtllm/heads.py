"""Log-probabilities of targets, from logits that the engine gave.

Of a row only its targets' logits and its normaliser are used; all on the device. From hidden states
the head of the torch backend does the same without logits of the whole vocabulary
(engine/backends/torch/head.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.backend import Norm, Targets, TokenColumns
from engine.backends.torch.head import Head
from engine.score_norms import log_softmax_of_targets, subtract_normaliser

_NUMBERS = 1 << 27  # logits taken to float32 at once


def log_probs_of_logits(logits: Tensor, targets: Targets, norm: Norm) -> Tensor:
    """Log-probabilities `[M]` float32 of targets whose rows index `logits` `[R, vocab]`."""
    columns = _ids(targets.columns, logits.device)
    chosen = logits[targets.row, columns[targets.column]].float()
    if norm.kind == "trie":
        return log_softmax_of_targets(chosen, targets, len(logits))
    if norm.kind == "full_vocab":
        normaliser = _log_sum(logits, None)
    else:
        assert norm.columns is not None, f"norm {norm.kind} needs its columns"
        normaliser = _log_sum(logits, _ids(norm.columns, logits.device))
    return subtract_normaliser(chosen, normaliser, targets.row)


def head_of(weight: Tensor, bias: Tensor | None, vocab_size: int) -> Head:
    """The head on demand over the engine's own weights, without what pads them."""
    rows = weight[:vocab_size]
    linear = nn.Linear(rows.shape[1], vocab_size, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(rows, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias[:vocab_size], requires_grad=False)
    return Head(linear, independent=False)


def _ids(columns: TokenColumns, device: torch.device) -> Tensor:
    return torch.from_numpy(columns.token_ids).to(device)


def _log_sum(logits: Tensor, columns: Tensor | None) -> Tensor:
    """Log-sum-exp of each row over the columns `[R]` float32."""
    out = logits.new_empty(len(logits), dtype=torch.float32)
    width = logits.shape[1] if columns is None else len(columns)
    step = max(1, _NUMBERS // max(width, 1))
    for begin in range(0, len(logits), step):
        some = logits[begin : begin + step]
        some = some if columns is None else some[:, columns]
        out[begin : begin + step] = some.float().logsumexp(dim=-1)
    return out

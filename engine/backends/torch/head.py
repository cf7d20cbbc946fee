"""The LM head, on demand: only the rows that are read, only the columns that are needed.

The normaliser over the whole vocabulary is a log-sum-exp of log-sum-exps over chunks of the head;
`[rows, vocab]` is never held. A chunk's logits stay in a CPU's cache while they are summed, and its
columns stay there while all rows meet them.

In float32 the head is one matmul like any other. In lower precision the logits that are asked for
are float32 all the same (engine/backends/torch/wide_logits.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.backend import Norm, Targets, TokenColumns
from engine.backends.torch.head_transform import HeadTransform
from engine.backends.torch.prepacked import Linear, Prepack, plain
from engine.backends.torch.wide_logits import (
    Asked,
    StandIns,
    WideLogits,
    by_matmul,
    is_few,
    rows_at_once,
)
from engine.row_tiles import TILE, pad_rows, row_chunks
from engine.score_norms import log_softmax_of_targets, subtract_normaliser

_ROWS = {"cpu": 256, "cuda": 2048}  # of one chunk of logits; on a CPU, for each thread
_MANY = 32768  # columns; beyond, a target's logit is a product of its own
_PRODUCTS = 1 << 22  # elements of target rows and columns multiplied at once
_COLUMNS = {"cpu": 2048, "cuda": 16384}  # a chunk that stays in a CPU's cache; one that fills a GPU
_LOGITS = 1 << 24  # of targets, held at once
LogSum = Callable[[Tensor], Tensor]
_LOG2_E = 1.4426950408889634


class Head:
    """Log-probabilities from hidden states."""

    def __init__(
        self,
        head: nn.Linear,
        *,
        independent: bool,
        log_sum: LogSum | None = None,
        prepack: Prepack | None = None,
        transform: HeadTransform | None = None,
    ) -> None:
        """`log_sum` `[R, C] -> [R]`, None: ours; `prepack` of the weights of the whole vocabulary,
        which are copied then; None: they are read where they are. `transform`: of the logits.
        """
        self._transform = transform
        self._independent = independent  # pad rows so that a row's bits are its own
        self._log_sum_of = log_sum or _stable_log_sum
        self._in_cache = log_sum is None and not independent and head.weight.device.type == "cpu"
        self._weight = head.weight.detach()
        self._bias = None if head.bias is None else head.bias.detach()
        self._parts: WeakKeyDictionary[TokenColumns, tuple[Tensor, Tensor | None]] = (
            WeakKeyDictionary()
        )
        self._lay_out = prepack or plain
        self._whole: list[Linear] | None = None  # made when first read
        self._vocabulary = TokenColumns(np.arange(len(self._weight), dtype=np.int64))
        self._wide: WideLogits | None = None  # of a head in low precision
        if self._weight.dtype.itemsize < torch.float32.itemsize:
            self._wide = WideLogits(self._weight, self._bias, transform)

    @property
    def described(self) -> str:
        """What is done to the logits, for messages; empty: nothing."""
        keys = () if self._transform is None else self._transform.keys
        return f" (logits transformed by {', '.join(keys)} of config.json)" if keys else ""

    def log_probs(self, hidden: Tensor, targets: Targets, norm: Norm) -> Tensor:
        """Log-probabilities `[M]` of targets whose rows index `hidden` `[R, hidden]`."""
        num_rows = len(hidden)
        if self._independent:
            hidden = pad_rows(hidden)
        if self._wide is not None:
            return self._in_float32(self._wide, hidden, targets, norm)
        logits = self._target_logits(hidden, targets)
        if self._transform is not None:
            logits = self._transform(logits)
        if norm.kind == "trie":
            return log_softmax_of_targets(logits, targets, num_rows)
        if norm.kind == "full_vocab":
            normaliser = self._log_sum(hidden, self._vocabulary_chunks())
        else:
            assert norm.columns is not None, f"norm {norm.kind} needs its columns"
            normaliser = self._log_sum(hidden, self._chunks(*self._part(norm.columns), plain))
        return subtract_normaliser(logits, normaliser, targets.row)

    def _in_float32(self, wide: WideLogits, hidden: Tensor, targets: Targets, norm: Norm) -> Tensor:
        """`log_probs` of a head in low precision, as many rows at once as their logits fit."""
        columns = self._vocabulary if norm.kind == "full_vocab" else norm.columns
        together = by_matmul(len(hidden), len(targets.row), targets.columns)
        held = len(targets.columns.token_ids) if together else 1
        if columns is not None and is_few(columns):
            held = max(held, len(columns.token_ids))
        out = []
        for rows, some in _by_rows(targets, len(hidden), rows_at_once(held)):
            asked = wide.asked(hidden[rows], some, together)
            if columns is None:
                num_rows = rows.stop - rows.start
                out.append(log_softmax_of_targets(asked.logits, some, num_rows))
                continue
            normaliser = self._wide_log_sum(wide, hidden[rows], asked, some, columns)
            out.append(subtract_normaliser(asked.logits, normaliser, some.row))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _wide_log_sum(
        self,
        wide: WideLogits,
        hidden: Tensor,
        asked: Asked,
        targets: Targets,
        columns: TokenColumns,
    ) -> Tensor:
        """Log-sum-exp `[R]` of the logits of `columns`: all in float32 where they are few, else
        those that are asked for.
        """
        if asked.every is not None and columns is targets.columns:
            return _stable_log_sum(asked.every)
        if is_few(columns):
            return _stable_log_sum(wide.of_columns(hidden, columns))
        stand_ins = wide.stand_ins(asked, targets, columns, _COLUMNS[hidden.device.type])
        if columns is self._vocabulary:
            return self._log_sum(hidden, self._vocabulary_chunks(), stand_ins)
        return self._log_sum(hidden, self._chunks(*self._part(columns), plain), stand_ins)

    def _vocabulary_chunks(self) -> list[Linear]:
        if self._whole is None:
            self._whole = self._chunks(self._weight, self._bias, self._lay_out)
        return self._whole

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
        if len(weight) > _MANY:
            return self._logits_one_by_one(hidden, targets, weight, bias)
        chunks = list(row_chunks(len(hidden), max(TILE, _LOGITS // len(weight))))
        if len(chunks) == 1:
            logits = functional.linear(hidden, weight, bias)
            return logits[targets.row, targets.column].float()
        out = []
        starts = torch.tensor([chunk.start for chunk in chunks], device=hidden.device)
        bounds = [*torch.searchsorted(targets.row, starts).tolist(), len(targets.row)]
        for i, chunk in enumerate(chunks):
            part = slice(bounds[i], bounds[i + 1])
            logits = functional.linear(hidden[chunk], weight, bias)
            out.append(logits[targets.row[part] - chunk.start, targets.column[part]].float())
        return torch.cat(out)

    @staticmethod
    def _logits_one_by_one(
        hidden: Tensor, targets: Targets, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Where a matmul would make a whole vocabulary of logits for each row that is read."""
        out = []
        step = max(1, _PRODUCTS // hidden.shape[1])
        for begin in range(0, len(targets.row), step):
            part = slice(begin, begin + step)
            row, column = targets.row[part], targets.column[part]
            logits = (hidden[row].float() * weight[column].float()).sum(dim=-1)
            out.append(logits if bias is None else logits + bias[column].float())
        return torch.cat(out) if out else hidden.new_empty(0, dtype=torch.float32)

    def _log_sum(
        self, hidden: Tensor, chunks: list[Linear], stand_ins: StandIns | None = None
    ) -> Tensor:
        """Log-sum-exp of each row's logits `[R]`, float32."""
        if self._in_cache:
            found = _fast_log_sum(hidden, chunks, stand_ins)
            if (over := ~found.isfinite()).any():
                others = None if stand_ins is None else stand_ins.of(over)
                found[over] = self._log_sum_of_chunks(hidden[over], chunks, others)
            return found
        return self._log_sum_of_chunks(hidden, chunks, stand_ins)

    def _chunks(self, weight: Tensor, bias: Tensor | None, prepack: Prepack) -> list[Linear]:
        """The head in blocks of columns, each with what the model does to its logits."""
        step = _COLUMNS[weight.device.type]
        parts = (slice(begin, begin + step) for begin in range(0, len(weight), step))
        chunks = [prepack(weight[part], None if bias is None else bias[part]) for part in parts]
        if self._transform is None:
            return chunks
        return [partial(_transformed, chunk, self._transform) for chunk in chunks]

    def _log_sum_of_chunks(
        self, hidden: Tensor, chunks: list[Linear], stand_ins: StandIns | None
    ) -> Tensor:
        sums = torch.empty((len(hidden), len(chunks)), device=hidden.device)
        for i, chunk in enumerate(chunks):
            for rows in row_chunks(len(hidden), _rows_at_once(hidden)):
                logits = chunk(hidden[rows])
                if stand_ins is not None:
                    logits = stand_ins.put(logits, i, rows)
                sums[rows, i] = self._log_sum_of(logits)
        return sums.logsumexp(dim=-1)


def _by_rows(targets: Targets, num_rows: int, most: int) -> Iterator[tuple[slice, Targets]]:
    """Chunks of the rows, and the targets at them."""
    chunks = list(row_chunks(num_rows, most))
    if len(chunks) <= 1:
        yield slice(0, num_rows), targets
        return
    starts = torch.tensor([chunk.start for chunk in chunks], device=targets.row.device)
    bounds = [*torch.searchsorted(targets.row, starts).tolist(), len(targets.row)]
    for i, chunk in enumerate(chunks):
        part = slice(bounds[i], bounds[i + 1])
        real = None if targets.real is None else targets.real[part]
        yield (
            chunk,
            Targets(
                row=targets.row[part] - chunk.start,
                column=targets.column[part],
                columns=targets.columns,
                real=real,
            ),
        )


def _transformed(linear: Linear, transform: HeadTransform, hidden: Tensor) -> Tensor:
    return transform(linear(hidden))


def _rows_at_once(hidden: Tensor) -> int:
    device = hidden.device.type
    return _ROWS[device] * (torch.get_num_threads() if device == "cpu" else 1)


def _stable_log_sum(logits: Tensor) -> Tensor:
    """`[R, C] -> [R]` float32; a row's bits are its own."""
    return logits.float().logsumexp(dim=-1)


def _fast_log_sum(hidden: Tensor, chunks: list[Linear], stand_ins: StandIns | None) -> Tensor:
    """Log-sum-exp of each row's logits `[R]`, float32; infinite for a row with a logit that is some
    80 nats above all of the first chunk.

    The largest logit of the first chunk, in place of the largest of all, saves a pass over the
    rest. Powers of two are faster than `exp` on a CPU; but a row's last columns may be
    computed by other code than the rest, which depends on where the row lies.
    """
    total, base = torch.zeros((2, len(hidden)))
    for i, chunk in enumerate(chunks):
        for rows in row_chunks(len(hidden), _rows_at_once(hidden)):
            logits = chunk(hidden[rows]).float()
            if stand_ins is not None:
                logits = stand_ins.put(logits, i, rows)
            if i == 0:
                base[rows] = logits.amax(dim=-1).mul_(-_LOG2_E)
            torch.sub(base[rows, None], logits, alpha=-_LOG2_E, out=logits)
            total[rows] += logits.exp2_().sum(dim=-1)
    found: Tensor = total.log_().sub_(base, alpha=1 / _LOG2_E)
    return found

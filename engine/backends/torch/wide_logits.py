"""Logits in float32 of the columns that are asked for, where the head is in low precision.

A product in bfloat16 keeps 8 bits: of a logit near 60 it drops up to 0.125, and items tie or change
places by rounding. The hidden state and the head's rows are taken to float32 instead, for the
tokens of a level or the tokens asked about, which are few beside the vocabulary. The normaliser
must know the same numbers, or the probabilities would not sum to 1: where the other columns are
summed in low precision, these stand in for theirs.

Legend: R rows, C columns of a set, M pairs of a row and a column that are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.backend import Targets, TokenColumns
from engine.backends.torch.head_transform import HeadTransform
from engine.row_tiles import TILE
from schemas.requests import Ints

_FEW = 8192  # columns that are always multiplied in float32, as a normaliser too
_MANY = 32768  # columns; beyond, each pair is a product of its own: no float32 copy is kept
_PAIR = 256  # columns of one row that are multiplied in the time of one product of its own
_PRODUCTS = 1 << 22  # elements of rows and columns multiplied pair by pair at once
_LOGITS = 1 << 24  # held at once

_Where = slice | Tensor


class WideLogits:
    """Float32 products of hidden states and rows of a head in low precision."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, transform: HeadTransform | None
    ) -> None:
        self._weight, self._bias, self._transform = weight, bias, transform
        self._kept: WeakKeyDictionary[TokenColumns, tuple[Tensor, Tensor | None]] = (
            WeakKeyDictionary()
        )
        self._ids: WeakKeyDictionary[TokenColumns, Tensor] = WeakKeyDictionary()
        self._places: WeakKeyDictionary[TokenColumns, WeakKeyDictionary[TokenColumns, Places]] = (
            WeakKeyDictionary()
        )

    def asked(self, hidden: Tensor, targets: Targets, together: bool) -> Asked:
        """Logits of the targets, whose rows index `hidden` `[R, hidden]`; `together`: with all
        others of their columns, by one matmul.
        """
        if together:
            every = self.of_columns(hidden, targets.columns)
            return Asked(every[targets.row, targets.column], every)
        return Asked(self._of_pairs(hidden, targets), None)

    def stand_ins(
        self, asked: Asked, targets: Targets, columns: TokenColumns, step: int
    ) -> StandIns:
        """What was asked for, in place of the logits of `columns`, which come in blocks of `step`
        and hold those of the targets.
        """
        known = self._places.setdefault(targets.columns, WeakKeyDictionary())
        if columns not in known:
            known[columns] = _places(targets.columns, columns, step, self._weight.device)
        places = known[columns]
        if asked.every is not None:
            return ColumnsStandIn(asked.every, places.blocks)
        return PairsStandIn(targets.row, places.of_column[targets.column], asked.logits, step)

    def of_columns(self, hidden: Tensor, columns: TokenColumns) -> Tensor:
        """Logits `[R, C]`, as the model transforms them. Keeps a float32 copy of these rows of the
        head for as long as `columns` lives.
        """
        if columns not in self._kept:
            at = _where(columns.token_ids, self._weight.device)
            bias = None if self._bias is None else self._bias[at].float()
            self._kept[columns] = (self._weight[at].float(), bias)
        return self._transformed(functional.linear(hidden.float(), *self._kept[columns]))

    def _of_pairs(self, hidden: Tensor, targets: Targets) -> Tensor:
        if targets.columns not in self._ids:
            ids = torch.from_numpy(np.ascontiguousarray(targets.columns.token_ids))
            self._ids[targets.columns] = ids.to(self._weight.device)
        token = self._ids[targets.columns][targets.column]
        out = [hidden.new_empty(0, dtype=torch.float32)]
        step = max(1, _PRODUCTS // hidden.shape[1])
        for begin in range(0, len(token), step):
            row, at = targets.row[begin : begin + step], token[begin : begin + step]
            logits = (hidden[row].float() * self._weight[at].float()).sum(dim=-1)
            out.append(logits if self._bias is None else logits + self._bias[at].float())
        return self._transformed(torch.cat(out))

    def _transformed(self, logits: Tensor) -> Tensor:
        return logits if self._transform is None else self._transform(logits)


@dataclass(frozen=True, slots=True)
class Asked:
    """Logits in float32: of the targets `[M]`, and of all columns `[R, C]` where they are known."""

    logits: Tensor
    every: Tensor | None


@dataclass(frozen=True, slots=True)
class Places:
    """Where columns are in a set that comes in blocks."""

    of_column: Tensor  # [C]
    blocks: dict[int, tuple[_Where, _Where]]  # of a block: places inside it, and whose


@dataclass(frozen=True, slots=True)
class ColumnsStandIn:
    """All of some columns: of each block which they are, and where they are in `every` `[R, C]`."""

    every: Tensor
    blocks: dict[int, tuple[_Where, _Where]]

    def put(self, logits: Tensor, block: int, rows: slice) -> Tensor:
        """The block's logits `[rows, columns]`, in float32 where some were put in."""
        if block not in self.blocks:
            return logits
        local, column = self.blocks[block]
        logits = logits.float()
        logits[:, local] = self.every[rows][:, column]
        return logits

    def of(self, some: Tensor) -> ColumnsStandIn:
        """Those of the rows for which `some` `[R]` is true, in place of all."""
        return replace(self, every=self.every[some])


@dataclass(frozen=True, slots=True)
class PairsStandIn:
    """Single columns of single rows. A pair may stand there twice."""

    row: Tensor  # [M] ascending
    place: Tensor  # [M] in the set that is summed
    logits: Tensor  # [M]
    step: int

    def put(self, logits: Tensor, block: int, rows: slice) -> Tensor:
        """The block's logits `[rows, columns]`, in float32 where some were put in."""
        begin, end = torch.searchsorted(
            self.row, torch.tensor([rows.start, rows.stop], device=self.row.device)
        ).tolist()
        place = self.place[begin:end] - block * self.step
        here = ((place >= 0) & (place < self.step)).nonzero()[:, 0]
        if not len(here):
            return logits
        logits = logits.float()
        row = self.row[begin:end][here] - rows.start
        logits[row, place[here]] = self.logits[begin:end][here]
        return logits

    def of(self, some: Tensor) -> PairsStandIn:
        """Those of the rows for which `some` `[R]` is true, in place of all."""
        kept = some[self.row]
        row = (some.cumsum(dim=0) - 1)[self.row[kept]]
        return replace(self, row=row, place=self.place[kept], logits=self.logits[kept])


StandIns = ColumnsStandIn | PairsStandIn


def is_few(columns: TokenColumns) -> bool:
    """Whether all logits of these columns are float32, whatever is asked of them."""
    return len(columns.token_ids) <= _FEW


def by_matmul(rows: int, pairs: int, columns: TokenColumns) -> bool:
    """Whether all columns of all rows are multiplied, rather than the pairs that are asked for."""
    size = len(columns.token_ids)
    return is_few(columns) or (size <= _MANY and rows * size <= pairs * _PAIR)


def rows_at_once(columns: int) -> int:
    """Rows whose logits of so many columns may be held."""
    return max(TILE, _LOGITS // columns)


def _where(ids: Ints, device: torch.device) -> _Where:
    """A slice where ids are contiguous."""
    if len(ids) and (np.diff(ids) == 1).all():
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return torch.from_numpy(np.ascontiguousarray(ids)).to(device)


def _places(asked: TokenColumns, columns: TokenColumns, step: int, device: torch.device) -> Places:
    ids = columns.token_ids
    order = np.argsort(ids, kind="stable")
    places: Ints = order[np.searchsorted(ids, asked.token_ids, sorter=order)]
    block, blocks = places // step, {}
    for i in np.unique(block).tolist():
        column = np.flatnonzero(block == i)
        blocks[i] = _where(places[column] - i * step, device), _where(column, device)
    return Places(torch.from_numpy(places).to(device), blocks)

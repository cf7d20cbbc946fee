"""The rules a user row must obey. A row is set aside by the first rule it breaks; the others keep
their places. Nothing here loops over good rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.requests import Ints, Ragged
from schemas.runs import RunPlan
from schemas.tables import DUPLICATE, ELIGIBILITY, FILE, K_COLUMN

_PAYLOAD_VALUES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedRow:
    """One row that could not be used. `payload` is what was found, for people to look at."""

    table: str
    key: str | None
    rule: str
    message: str
    payload: dict[str, Any]
    file: str | None = None


@dataclass(frozen=True, slots=True)
class UnknownItems:
    """Candidates that the catalog does not have; there may be very many, so they stay columns."""

    keys: pa.Array  # whose candidate it is, as text; null: of nobody in particular
    items: pa.Array

    def __len__(self) -> int:
        return len(self.items)


class UserCheck:
    """The rules a user row must obey, one method per rule; each sets rows aside."""

    def __init__(self, table: pa.Table, plan: RunPlan) -> None:
        self._table = table
        self._plan = plan
        self.ok = np.ones(len(table), dtype=bool)
        self.vectors: NDArray[np.float32] | None = None  # [good rows, D], once all rules have run
        self.quarantined: list[QuarantinedRow] = []

    def run(self) -> None:
        """Apply every rule; a row is set aside by the first it breaks."""
        template = self._plan.config.prompt.parsed
        self._reject(
            "null_user_id", _mask(self._table.column("user_id").is_null()), "user_id is null"
        )
        self._reject(
            "duplicate_user",
            _mask(self._table.column(DUPLICATE)),
            "the user stands more than once; the first row is used",
        )
        vector_rows = values = None
        if template.uses("user_vector"):
            vector_rows, values = self._check_vectors()
        if template.uses("user_sid"):
            self._check_user_sids()
        if self._plan.config.prompt.null_text is None:
            for name in template.columns:
                self._reject(
                    "null_slot",
                    _mask(self._table.column(name).is_null()),
                    f"column {name!r} is null and prompt.null_text is not set",
                )
        for name in self._table.column_names:
            if name.startswith(ELIGIBILITY):
                self._reject(
                    "null_slot",
                    _mask(self._table.column(name).is_null()),
                    f"column {name.removeprefix(ELIGIBILITY)!r} is null; task.eligibility needs it",
                )
        if K_COLUMN in self._table.column_names:
            most = self._plan.config.task.k
            k = pc.fill_null(self._table.column(K_COLUMN), most).to_numpy()
            message = f"{self._plan.config.task.k_column} must be 1 to {most}"
            self._reject("k_out_of_range", (k < 1) | (k > most), message, K_COLUMN)
        if vector_rows is not None and values is not None:
            self.vectors = np.ascontiguousarray(values[self.ok[vector_rows]], dtype=np.float32)

    def _reject(self, rule: str, bad: NDArray[np.bool_], message: str, column: str = "") -> None:
        for row in np.flatnonzero(bad & self.ok):
            self.quarantined.append(self._row(int(row), rule, message, column))
        self.ok &= ~bad

    def _row(self, row: int, rule: str, message: str, column: str) -> QuarantinedRow:
        user = self._table.column("user_id")[row].as_py()
        return QuarantinedRow(
            table="users",
            key=None if user is None else str(user),
            rule=rule,
            message=message,
            payload=_payload(column, self._table.column(column)[row].as_py()) if column else {},
            file=self._table.column(FILE)[row].as_py(),
        )

    def _check_vectors(self) -> tuple[Ints, NDArray[np.float32]]:
        """Rows with a usable vector, and their vectors.

        Vectors are taken row by row through their lists, never by flattening the column: a null
        fixed-size list leaves no values behind, and every later vector would shift.
        """
        column = self._table.column("embedding").combine_chunks()
        self._reject("null_vector", _mask(column.is_null()), "embedding is null")
        lengths = pc.fill_null(pc.list_value_length(column), -1).to_numpy().astype(np.int64)
        dim = self._plan.vector_dim or 1
        for length in np.unique(lengths[self.ok & (lengths != dim)]):
            self._reject(
                "vector_length",
                lengths == length,
                f"embedding has {length} values, expected {dim}",
                "embedding",
            )
        rows = np.flatnonzero(self.ok)
        flat = column.take(pa.array(rows)).flatten()
        values = pc.fill_null(flat, np.nan).to_numpy(zero_copy_only=False).reshape(-1, dim)
        finite = np.isfinite(values).all(axis=1)
        bad = np.zeros(len(self.ok), dtype=bool)
        bad[rows[~finite]] = True
        self._reject("vector_not_finite", bad, "embedding holds NaN, Inf or null", "embedding")
        return rows[finite], values[finite]

    def _check_user_sids(self) -> None:
        column = self._table.column("user_sid").combine_chunks()
        self._reject("null_slot", _mask(column.is_null()), "user_sid is null")
        sizes = np.asarray(self._plan.config.space.sizes)
        lists = ragged(column)
        place = np.arange(len(lists.values)) - np.repeat(lists.offsets[:-1], lists.lengths)
        size = sizes[place % len(sizes)]
        outside = (lists.values < 0) | (lists.values >= size)
        bad = np.bincount(lists.row_ids[outside], minlength=lists.num_rows) > 0
        bad |= lists.lengths % len(sizes) != 0
        self._reject(
            "user_sid_codes",
            bad,
            f"user_sid must hold whole semantic IDs of {len(sizes)} codes inside their codebooks",
            "user_sid",
        )


def _mask(column: pa.ChunkedArray | pa.Array) -> NDArray[np.bool_]:
    out: NDArray[np.bool_] = (
        column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy()
    )
    return out.astype(bool)


def _payload(column: str, value: Any) -> dict[str, Any]:
    """The offending value, cut short, and safe for JSON (NaN is not)."""
    if isinstance(value, list):
        shown = [v if v is None or v == v else "NaN" for v in value[:_PAYLOAD_VALUES]]
        shown = [v if not isinstance(v, float) or abs(v) != float("inf") else str(v) for v in shown]
        return {column: shown, "length": len(value)}
    return {column: value}


def ragged(column: pa.Array) -> Ragged:
    """A list column as flat int64 values; null lists are empty."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    flat = column.flatten()
    return Ragged.from_lengths(lengths, pc.fill_null(flat, -1).to_numpy(zero_copy_only=False))

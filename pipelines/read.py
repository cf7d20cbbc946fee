"""Read a shard and sort its rows: users the engine can take, and rows for the quarantine.

A row that breaks its contract is set aside with the rule it broke; the others keep their places.
Nothing here loops over good rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines import files
from pipelines.catalog import Catalog
from pipelines.eligibility import eligible_items
from pipelines.prepare import ELIGIBILITY, candidate_sets_path
from schemas.eligibility import Expression, user_columns
from schemas.requests import Eligibility, Ints, Ragged, UserBatch
from schemas.runs import Counts, RunPlan, Shard

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInput:
    """A shard, sorted out. `users[u]` has id `user_ids[u]`."""

    users: UserBatch
    user_ids: pa.Array
    quarantined: list[QuarantinedRow]
    counts: Counts


def read_shard(plan: RunPlan, shard: Shard, catalog: Catalog) -> ShardInput:
    """Read and validate one prepared shard.

    Raises:
        StorageError: the shard file is missing or damaged.
    """
    table = files.read_parquet(shard.path)
    is_user = table.column("file").is_valid().to_numpy()
    strays = table.filter(pa.array(~is_user))
    table = table.filter(pa.array(is_user))
    check = _Check(table, plan)
    check.run()
    good = np.flatnonzero(check.ok).astype(np.int64)
    kept = table.take(pa.array(good))

    quarantined = check.quarantined
    counts = Counts(
        users_in=len(table),
        users_quarantined=len(table) - len(good),
        candidates_in=_list_total(table) + _list_total(strays),
        candidates_unused=_list_total(table) - _list_total(kept) + _list_total(strays),
    )
    quarantined += _stray_candidates(strays)
    users, more, item_counts = _to_batch(plan, kept, catalog, check.vectors)
    return ShardInput(
        users=users,
        user_ids=kept.column("user_id").combine_chunks(),
        quarantined=quarantined + more,
        counts=counts + item_counts,
    )


class _Check:
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
            _mask(self._table.column("duplicate")),
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
            file=self._table.column("file")[row].as_py(),
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
        sizes = np.asarray(self._plan.config.sid.sizes)
        lists = _ragged(column)
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


def _list_total(table: pa.Table) -> int:
    total = pc.sum(pc.list_value_length(table.column("candidates"))).as_py()
    return int(total or 0)


def _stray_candidates(strays: pa.Table) -> list[QuarantinedRow]:
    lengths = pc.fill_null(pc.list_value_length(strays.column("candidates")), 0).to_pylist()
    return [
        QuarantinedRow(
            table="candidates",
            key=None if user is None else str(user),
            rule="user_not_in_users",
            message="candidates of a user that is not in the users table",
            payload={"candidates": count},
        )
        for user, count in zip(strays.column("user_id").to_pylist(), lengths, strict=True)
    ]


def _ragged(column: pa.Array) -> Ragged:
    """A list column as flat int64 values; null lists are empty."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    flat = column.flatten()
    return Ragged.from_lengths(lengths, pc.fill_null(flat, -1).to_numpy(zero_copy_only=False))


def _positions(column: pa.Array, catalog: Catalog) -> tuple[Ragged, pa.Array]:
    """A column of item-id lists as catalog positions (-1: unknown), and the flat ids themselves."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    flat = column.flatten()
    return Ragged.from_lengths(lengths, catalog.positions(flat)), flat


def _to_batch(
    plan: RunPlan, table: pa.Table, catalog: Catalog, vectors: NDArray[np.float32] | None
) -> tuple[UserBatch, list[QuarantinedRow], Counts]:
    """Good rows by catalog position; unknown, repeated and excluded candidates are taken out."""
    template = plan.config.prompt.parsed
    counts = Counts()
    history = user_sids = None
    if template.uses("history"):
        found, _ = _positions(table.column("history").combine_chunks(), catalog)
        history = found.keep(found.values >= 0)
        unknown = len(found.values) - len(history.values)
        counts = Counts(unknown_history_items=unknown)
    if template.uses("user_sid"):
        user_sids = _ragged(table.column("user_sid").combine_chunks())
    excluded, _ = _positions(table.column("excluded").combine_chunks(), catalog)
    excluded = excluded.keep(excluded.values >= 0)
    eligibility = _eligibility(plan, table, catalog)
    candidates: Ragged | None = None
    quarantined: list[QuarantinedRow] = []
    if plan.config.task.score is not None:
        found, ids, added = _candidates(plan, table, catalog)
        candidates, quarantined, item_counts = _clean_candidates(
            found, ids, excluded, eligibility, table, catalog
        )
        counts = counts + item_counts + added
    texts = {
        name: _texts(table.column(name), plan.config.prompt.null_text) for name in template.columns
    }
    users = UserBatch(
        num_users=len(table),
        vectors=vectors,
        history=history,
        user_sids=user_sids,
        texts=texts,
        candidates=candidates,
        excluded=excluded,
        eligibility=eligibility,
    )
    return users, quarantined, counts


def _eligibility(plan: RunPlan, table: pa.Table, catalog: Catalog) -> Eligibility | None:
    rule = plan.config.task.eligible
    if rule is None:
        return None
    return eligible_items(rule, eligibility_columns(rule, table), catalog.table)


def eligibility_columns(rule: Expression, shard: pa.Table) -> pa.Table:
    """The users columns that the eligibility reads, under their own names."""
    columns = {name: shard.column(ELIGIBILITY + name) for name in user_columns(rule)}
    return pa.table(columns) if columns else shard.select(["user_id"])


def _texts(column: pa.ChunkedArray, null_text: str | None) -> list[str]:
    filled = column if null_text is None else pc.fill_null(column, null_text)
    texts: list[str] = filled.to_pylist()
    return texts


def _candidates(
    plan: RunPlan, table: pa.Table, catalog: Catalog
) -> tuple[Ragged, pa.Array, Counts]:
    """Each user's candidates: its own, its segment's, or the shared set."""
    path = candidate_sets_path(plan)
    if not files.exists(path):
        found, ids = _positions(table.column("candidates").combine_chunks(), catalog)
        return found, ids, Counts()
    sets = files.read_parquet(path)
    segments = sets.column("segment").combine_chunks()
    encoded = pc.dictionary_encode(segments, null_encoding="encode")
    group = encoded.indices.to_numpy().astype(np.int64)
    order = np.argsort(group, kind="stable").astype(np.int64)
    ids = sets.column("item").combine_chunks().take(pa.array(order))
    lists = Ragged.from_lengths(np.bincount(group), catalog.positions(ids))
    if segments.null_count == len(segments):  # one set shared by all
        which = np.zeros(len(table), dtype=np.int64)
    else:
        wanted = table.column("segment").combine_chunks()
        found_at = pc.index_in(wanted, value_set=encoded.dictionary)
        which = pc.fill_null(found_at, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        lists = Ragged(np.append(lists.offsets, lists.offsets[-1]), lists.values)
        which = np.where(which < 0, lists.num_rows - 1, which)  # no such segment: the empty list
    place = Ragged(lists.offsets, np.arange(len(lists.values), dtype=np.int64)).take(which)
    added = Counts(candidates_in=len(place.values))
    return (
        Ragged(place.offsets, lists.values[place.values]),
        ids.take(pa.array(place.values)),
        added,
    )


def _clean_candidates(
    found: Ragged,
    ids: pa.Array,
    excluded: Ragged,
    eligibility: Eligibility | None,
    table: pa.Table,
    catalog: Catalog,
) -> tuple[Ragged, list[QuarantinedRow], Counts]:
    user = found.row_ids
    known = found.values >= 0
    unknown_at = np.flatnonzero(~known)
    names: Sequence[Any] = table.column("user_id").take(pa.array(user[unknown_at])).to_pylist()
    unknown_ids = ids.take(pa.array(unknown_at)).to_pylist()
    quarantined = [
        QuarantinedRow(
            table="candidates",
            key=str(name),
            rule="unknown_item",
            message="the candidate is not in the catalog",
            payload={"item_id": item},
        )
        for name, item in zip(names, unknown_ids, strict=True)
    ]
    size = len(catalog.table)
    key = user * size + found.values
    first = np.zeros(len(key), dtype=bool)
    known_at = np.flatnonzero(known)
    _, first_at = np.unique(key[known_at], return_index=True)
    first[known_at[first_at]] = True
    forbidden = np.isin(key, excluded.row_ids * size + excluded.values) & first
    kept = first & ~forbidden
    ineligible = np.zeros(len(kept), dtype=bool)
    if eligibility is not None:
        ineligible[kept] = ~eligibility.of(user[kept], found.values[kept])
        kept &= ~ineligible
    counts = Counts(
        candidates_unknown=len(unknown_at),
        candidates_duplicate=int((known & ~first).sum()),
        candidates_excluded=int(forbidden.sum()),
        candidates_ineligible=int(ineligible.sum()),
        candidates_scored=int(kept.sum()),
    )
    return found.keep(kept), quarantined, counts


def quarantine_json(payload: dict[str, Any]) -> str:
    """A payload as the quarantine table holds it."""
    return json.dumps(payload, default=str, ensure_ascii=False)

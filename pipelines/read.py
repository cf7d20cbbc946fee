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
from pipelines.prepare import candidate_sets_path
from pipelines.validate import QuarantinedRow, UserCheck, ragged
from schemas.eligibility import Expression, user_columns
from schemas.requests import Eligibility, Ints, Ragged, UserBatch
from schemas.runs import Counts, RunPlan, Shard
from schemas.tables import CANDIDATE_LIST, ELIGIBILITY, EXCLUDED_LIST, FILE, K_COLUMN


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInput:
    """A shard, sorted out. `users[u]` has id `user_ids[u]`."""

    users: UserBatch
    user_ids: pa.Array
    k: Ints  # [U] items wanted
    quarantined: list[QuarantinedRow]
    counts: Counts


def read_shard(plan: RunPlan, shard: Shard, catalog: Catalog) -> ShardInput:
    """Read and validate one prepared shard.

    Raises:
        StorageError: the shard file is missing or damaged.
    """
    table = files.read_parquet(shard.path)
    is_user = table.column(FILE).is_valid().to_numpy()
    strays = table.filter(pa.array(~is_user))
    table = table.filter(pa.array(is_user))
    check = UserCheck(table, plan)
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
        k=_wanted(plan, kept),
        quarantined=quarantined + more,
        counts=counts + item_counts,
    )


def _wanted(plan: RunPlan, table: pa.Table) -> Ints:
    """k of each user `[U]`."""
    if K_COLUMN not in table.column_names:
        return np.full(len(table), plan.config.task.k, dtype=np.int64)
    wanted: Ints = pc.fill_null(table.column(K_COLUMN), plan.config.task.k).to_numpy()
    return wanted


def _list_total(table: pa.Table) -> int:
    total = pc.sum(pc.list_value_length(table.column(CANDIDATE_LIST))).as_py()
    return int(total or 0)


def _stray_candidates(strays: pa.Table) -> list[QuarantinedRow]:
    lengths = pc.fill_null(pc.list_value_length(strays.column(CANDIDATE_LIST)), 0).to_pylist()
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
        user_sids = ragged(table.column("user_sid").combine_chunks())
    excluded, _ = _positions(table.column(EXCLUDED_LIST).combine_chunks(), catalog)
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
    filled = column.cast(pa.string())  # a user_id may be a number
    filled = filled if null_text is None else pc.fill_null(filled, null_text)
    texts: list[str] = filled.to_pylist()
    return texts


def _candidates(
    plan: RunPlan, table: pa.Table, catalog: Catalog
) -> tuple[Ragged, pa.Array, Counts]:
    """Each user's candidates: its own, its segment's, or the shared set."""
    path = candidate_sets_path(plan)
    if not files.exists(path):
        found, ids = _positions(table.column(CANDIDATE_LIST).combine_chunks(), catalog)
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

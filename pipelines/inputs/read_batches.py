"""Read a shard and sort its rows: users the engine can take, and rows for the quarantine.

A row that breaks its contract is set aside with the rule it broke; the others keep their places.
Nothing here loops over good rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.catalog.build import Catalog
from pipelines.inputs.candidates import positions, read_candidates, unused_of_shared
from pipelines.inputs.eligibility import eligible_items
from pipelines.inputs.row_rules import QuarantinedRow, UnknownItems, UserCheck, ragged
from pipelines.inputs.shard_table import read_shard_table
from schemas.counts import Counts
from schemas.eligibility import Expression, user_columns, with_date
from schemas.requests import CandidateSets, Eligibility, Ints, Labels, Ragged, UserBatch
from schemas.runs import RunPlan, Shard
from schemas.tables import (
    CANDIDATE_LIST,
    DUPLICATE,
    ELIGIBILITY,
    EXCLUDED_LIST,
    FILE,
    K_COLUMN,
    LABELS_COLUMN,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInput:
    """A shard, sorted out. `users[u]` has id `user_ids[u]`."""

    users: UserBatch
    user_ids: pa.Array
    k: Ints  # [U] items wanted
    quarantined: list[QuarantinedRow]
    unknown: UnknownItems | None
    counts: Counts


def read_shard(plan: RunPlan, shard: Shard, catalog: Catalog | None) -> ShardInput:
    """Read and validate one prepared shard.

    Raises:
        StorageError: the shard file is missing or damaged.
    """
    table = read_shard_table(plan, shard)
    is_user = table.column(FILE).is_valid().to_numpy()
    strays = table.filter(pa.array(~is_user))
    table = table.filter(pa.array(is_user))
    check = UserCheck(table, plan)
    check.run()
    good = np.flatnonzero(check.ok).astype(np.int64)
    kept = table.take(pa.array(good))

    quarantined = check.quarantined
    unused = _list_total(table) - _list_total(kept) + _list_total(strays)
    if plan.config.task.uses_candidates and catalog is not None:
        known = pc.and_(table.column("user_id").is_valid(), pc.invert(table.column(DUPLICATE)))
        set_aside = pc.and_(known, pa.array(~check.ok))
        unused += unused_of_shared(plan, table.filter(set_aside), catalog)
    counts = Counts(
        users_in=len(table),
        users_quarantined=len(table) - len(good),
        candidates_in=_list_total(kept) + unused,
        candidates_unused=unused,
    )
    quarantined += _stray_candidates(strays)
    users, unknown, item_counts = _to_batch(plan, shard, kept, catalog, check.vectors)
    return ShardInput(
        users=users,
        user_ids=kept.column("user_id").combine_chunks(),
        k=_wanted(plan, kept),
        quarantined=quarantined,
        unknown=unknown,
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


def _to_batch(
    plan: RunPlan,
    shard: Shard,
    table: pa.Table,
    catalog: Catalog | None,
    vectors: NDArray[np.float32] | None,
) -> tuple[UserBatch, UnknownItems | None, Counts]:
    """Good rows by catalog position; candidates that cannot be scored are taken out."""
    template = plan.config.prompt.parsed
    counts = Counts()
    history = user_sids = excluded = eligibility = None
    if plan.config.reads_history:
        assert catalog is not None, "history needs a catalog"
        found, _ = positions(table.column("history").combine_chunks(), catalog)
        history = found.keep(found.values >= 0)
        counts = Counts(
            history_items=len(found.values),
            unknown_history_items=len(found.values) - len(history.values),
        )
    if template.uses("user_sid"):
        user_sids = ragged(table.column("user_sid").combine_chunks())
    if catalog is not None:
        excluded, _ = positions(table.column(EXCLUDED_LIST).combine_chunks(), catalog)
        excluded = excluded.keep(excluded.values >= 0)
        if plan.config.task.exclude_history:
            assert history is not None, "it is read to be left out"
            excluded = excluded.followed_by(history)
        eligibility = _eligibility(plan, table, catalog)
    candidates: CandidateSets | None = None
    unknown_items: UnknownItems | None = None
    if plan.config.task.uses_candidates:
        assert catalog is not None, "candidates need a catalog"
        assert excluded is not None, "read with the catalog"
        candidates, unknown_items, added = read_candidates(
            plan, shard, table, catalog, excluded, eligibility
        )
        counts = counts + added
    texts = {
        name: texts_of(table.column(name), plan.config.prompt.null_text)
        for name in template.columns
    }
    users = UserBatch(
        num_users=len(table),
        vectors=vectors,
        history=history if template.uses("history") else None,
        user_sids=user_sids,
        texts=texts,
        candidates=candidates,
        labels=_labels(table),
        excluded=excluded,
        eligibility=eligibility,
        k=_wanted(plan, table) if K_COLUMN in table.column_names else None,
    )
    return users, unknown_items, counts


def _labels(table: pa.Table) -> Labels | None:
    """Each user's own labels, an empty list where it has none; None: there is no such column."""
    if LABELS_COLUMN not in table.column_names:
        return None
    column = table.column(LABELS_COLUMN).combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    encoded = pc.dictionary_encode(column.flatten(), null_encoding="encode")
    names = tuple(encoded.dictionary.to_pylist())
    return Labels(names, Ragged.from_lengths(lengths, encoded.indices.to_numpy()))


def _eligibility(plan: RunPlan, table: pa.Table, catalog: Catalog) -> Eligibility | None:
    rule = plan.config.task.eligible
    if rule is None:
        return None
    users = eligibility_columns(rule, table)
    return eligible_items(with_date(rule, plan.ds), users, catalog.table)


def eligibility_columns(rule: Expression, shard: pa.Table) -> pa.Table:
    """The users columns that the eligibility reads, under their own names."""
    columns = {name: shard.column(ELIGIBILITY + name) for name in user_columns(rule)}
    return pa.table(columns) if columns else shard.select(["user_id"])


def texts_of(column: pa.ChunkedArray, null_text: str | None) -> list[str]:
    """A column as a prompt writes it."""
    filled = column.cast(pa.string())  # a user_id may be a number
    filled = filled if null_text is None else pc.fill_null(filled, null_text)
    texts: list[str] = filled.to_pylist()
    return texts


def quarantine_json(payload: dict[str, Any]) -> str:
    """A payload as the quarantine table holds it."""
    return json.dumps(payload, default=str, ensure_ascii=False)

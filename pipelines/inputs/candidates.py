"""Candidate sets of a shard: a user's own, its segment's, or one shared by all.

What cannot be scored is taken out and counted: items that are not in the catalog, items that stand
twice, and what the user must not get. A set that users share is cleaned once; what one of them must
not get is only counted here, and left out of its scores by the engine.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.catalog.build import Catalog
from pipelines.inputs.prepared import candidate_sets_path, read_prepared
from pipelines.inputs.row_rules import UnknownItems
from pipelines.inputs.shard_columns import shape_of_candidates
from schemas.counts import Counts
from schemas.requests import CandidateSets, Eligibility, Ints, Ragged
from schemas.runs import RunPlan, Shard
from schemas.tables import CANDIDATE_LIST


def positions(column: pa.Array, catalog: Catalog) -> tuple[Ragged, pa.Array]:
    """A column of item-id lists as catalog positions (-1: unknown), and the flat ids themselves."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    flat = column.flatten()
    return Ragged.from_lengths(lengths, catalog.positions(flat)), flat


def read_candidates(
    plan: RunPlan,
    shard: Shard,
    table: pa.Table,
    catalog: Catalog,
    excluded: Ragged,
    eligibility: Eligibility | None,
) -> tuple[CandidateSets, UnknownItems | None, Counts]:
    """The candidates of the users of `table` `[U]`, unknown ones, and what was counted.

    Unknown items of shared sets are quarantined once, by the first shard, and counted per user.
    """
    path = candidate_sets_path(plan)
    if not are_shared(plan):
        lists, ids = positions(table.column(CANDIDATE_LIST).combine_chunks(), catalog)
        names = table.column("user_id")
        unknown = _unknown(lists, ids, names)
        candidates, counts = _own_sets(lists, excluded, eligibility, catalog)
        return candidates, unknown, counts
    sets, ids, names, which = _shared_sets(read_prepared(plan, path), table, catalog)
    candidates, counts = _clean_shared(sets, which, excluded, eligibility, catalog)
    return candidates, _unknown(sets, ids, names) if shard.index == 0 else None, counts


def unused_of_shared(plan: RunPlan, users: pa.Table, catalog: Catalog) -> int:
    """Candidates in the shared sets of users that are not scored; own sets are in the shard."""
    path = candidate_sets_path(plan)
    if not len(users) or not are_shared(plan):
        return 0
    sets, _, _, which = _shared_sets(read_prepared(plan, path), users, catalog)
    return int(sets.lengths[which].sum())


def are_shared(plan: RunPlan) -> bool:
    """Whether candidates are sets by segment or one for all, and not of each user."""
    return shape_of_candidates(plan) in ("segment", "shared")


def _unknown(lists: Ragged, ids: pa.Array, names: pa.ChunkedArray) -> UnknownItems:
    """The candidates that the catalog does not have; `names` says whose list it is."""
    at = np.flatnonzero(lists.values < 0)
    owners = names.take(pa.array(lists.row_ids[at])).cast(pa.string()).combine_chunks()
    return UnknownItems(owners, ids.take(pa.array(at)))


def _once(lists: Ragged, num_items: int) -> NDArray[np.bool_]:
    """Which values are known items that stand for the first time in their list."""
    first = np.zeros(len(lists.values), dtype=bool)
    known_at = np.flatnonzero(lists.values >= 0)
    key = lists.row_ids * num_items + lists.values
    _, first_at = np.unique(key[known_at], return_index=True)
    first[known_at[first_at]] = True
    return first


def _own_sets(
    lists: Ragged, excluded: Ragged, eligibility: Eligibility | None, catalog: Catalog
) -> tuple[CandidateSets, Counts]:
    size = len(catalog.table)
    user, known = lists.row_ids, lists.values >= 0
    first = _once(lists, size)
    forbidden = first & np.isin(
        user * size + lists.values, excluded.row_ids * size + excluded.values
    )
    kept = first & ~forbidden
    ineligible = np.zeros(len(kept), dtype=bool)
    if eligibility is not None:
        ineligible[kept] = ~eligibility.of(user[kept], lists.values[kept])
        kept &= ~ineligible
    counts = Counts(
        candidates_unknown=int((~known).sum()),
        candidates_duplicate=int((known & ~first).sum()),
        candidates_excluded=int(forbidden.sum()),
        candidates_ineligible=int(ineligible.sum()),
        candidates_scored=int(kept.sum()),
    )
    return CandidateSets.own(lists.keep(kept)), counts


def _shared_sets(
    table: pa.Table, users: pa.Table, catalog: Catalog
) -> tuple[Ragged, pa.Array, pa.ChunkedArray, Ints]:
    """All sets by catalog position, their ids, whose they are, and the set of each user `[U]`."""
    segments = table.column("segment").combine_chunks()
    encoded = pc.dictionary_encode(segments, null_encoding="encode")
    group = encoded.indices.to_numpy().astype(np.int64)
    order = np.argsort(group, kind="stable").astype(np.int64)
    ids = table.column("item").combine_chunks().take(pa.array(order))
    num_sets = len(encoded.dictionary)
    lengths = np.append(np.bincount(group, minlength=num_sets), 0)  # the last: no such segment
    sets = Ragged.from_lengths(lengths, catalog.positions(ids))
    names = pa.chunked_array([encoded.dictionary, pa.nulls(1, encoded.dictionary.type)])
    if segments.null_count == len(segments):  # one set shared by all
        return sets, ids, names, np.zeros(len(users), dtype=np.int64)
    wanted = users.column("segment").combine_chunks()
    found = pc.fill_null(pc.index_in(wanted, value_set=encoded.dictionary), num_sets)
    return sets, ids, names, found.to_numpy(zero_copy_only=False).astype(np.int64)


def _clean_shared(
    sets: Ragged,
    of_user: Ints,
    excluded: Ragged,
    eligibility: Eligibility | None,
    catalog: Catalog,
) -> tuple[CandidateSets, Counts]:
    size = len(catalog.table)
    first = _once(sets, size)
    none = np.zeros_like(of_user)
    clean = CandidateSets(sets.keep(first), of_user, none, shared=True)
    users_of = np.bincount(of_user, minlength=sets.num_rows)

    def total(mask: NDArray[np.bool_]) -> int:
        """Over users: values of their set where `mask` holds."""
        return int((np.bincount(sets.row_ids[mask], minlength=sets.num_rows) * users_of).sum())

    unknown = total(sets.values < 0)
    held = total(first)
    user, item = _held(clean, excluded, size)
    out = np.zeros(len(of_user), dtype=np.int64)
    if eligibility is not None:
        out = _ineligible(clean, eligibility)
        also = ~eligibility.of(user, item)  # excluded comes first
        out -= np.bincount(user[also], minlength=len(of_user))
    counts = Counts(
        candidates_in=total(np.ones(len(first), dtype=bool)),
        candidates_unknown=unknown,
        candidates_duplicate=total(sets.values >= 0) - held,
        candidates_excluded=len(user),
        candidates_ineligible=int(out.sum()),
        candidates_scored=held - len(user) - int(out.sum()),
    )
    forbidden = np.bincount(user, minlength=len(of_user)) + out
    return replace(clean, forbidden=forbidden), counts


def _held(candidates: CandidateSets, excluded: Ragged, num_items: int) -> tuple[Ints, Ints]:
    """Distinct (user, excluded item) pairs whose item is in the user's set."""
    pairs = np.unique(excluded.row_ids * num_items + excluded.values)
    user, item = pairs // num_items, pairs % num_items
    keys = candidates.sets.row_ids * num_items + candidates.sets.values
    held = np.isin(candidates.of_user[user] * num_items + item, keys)
    return user[held], item[held]


def _ineligible(candidates: CandidateSets, eligibility: Eligibility) -> Ints:
    """Items of each user's set that it is not eligible for `[U]`; once per segment and set."""
    pairs, of_user = np.unique(
        np.stack([eligibility.segment, candidates.of_user]), axis=1, return_inverse=True
    )
    counts = [
        int((~eligibility.eligible[segment, candidates.sets.row(which)]).sum())
        for segment, which in pairs.T.tolist()
    ]
    return np.asarray(counts, dtype=np.int64)[of_user.reshape(-1)]

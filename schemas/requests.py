"""What goes into the engine and what comes out: columnar, by catalog position, no ids and no
tensors.

Legend: U users of a batch, D vector length, N items of the catalog, S distinct SIDs of the catalog.
An *item* is a row number of the catalog; a *sid* is a number 0..S-1, in lexicographic order of the
codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from schemas.search_work import NativeBeams, SearchWork

Ints = NDArray[np.int64]
UNSCORED = np.finfo(np.float32).min  # "score" of what the model gave probability 0
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lists of different lengths: list r is `values[offsets[r]:offsets[r + 1]]`."""

    offsets: Ints  # [rows + 1]
    values: Ints  # [offsets[-1]]

    @classmethod
    def from_lists(cls, lists: Iterable[Iterable[int]]) -> Ragged:
        """Build from Python lists; for tests and small inputs."""
        rows = [np.asarray(list(row), dtype=np.int64) for row in lists]
        values = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        return cls.from_lengths(np.asarray([len(row) for row in rows], dtype=np.int64), values)

    @classmethod
    def from_lengths(cls, lengths: NDArray[Any], values: NDArray[Any]) -> Ragged:
        """Build from the length of each list and their values end to end."""
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(offsets, values.astype(np.int64, copy=False))

    @classmethod
    def empty(cls, rows: int) -> Ragged:
        """`rows` empty lists."""
        return cls(np.zeros(rows + 1, dtype=np.int64), np.empty(0, dtype=np.int64))

    @property
    def num_rows(self) -> int:
        """How many lists."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ints:
        """Length of each list `[rows]`."""
        return np.diff(self.offsets)

    @property
    def row_ids(self) -> Ints:
        """The list each value belongs to `[values]`."""
        return np.repeat(np.arange(self.num_rows, dtype=np.int64), self.lengths)

    def row(self, index: int) -> Ints:
        """One list."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: Ints) -> Ragged:
        """The lists at `rows`, in that order."""
        lengths = self.lengths[rows]
        out = Ragged.from_lengths(lengths, np.empty(0, dtype=np.int64))
        source = np.repeat(self.offsets[rows] - out.offsets[:-1], lengths)
        return Ragged(out.offsets, self.values[source + np.arange(out.offsets[-1])])

    def keep(self, mask: NDArray[np.bool_]) -> Ragged:
        """The same lists without the values where `mask` `[values]` is False."""
        lengths = np.bincount(self.row_ids[mask], minlength=self.num_rows)
        return Ragged.from_lengths(lengths, self.values[mask])

    def followed_by(self, other: Ragged) -> Ragged:
        """Each list with the list of the same row of `other` behind it."""
        rows = np.concatenate([self.row_ids, other.row_ids])
        values = np.concatenate([self.values, other.values])
        return Ragged.from_lengths(
            self.lengths + other.lengths, values[np.argsort(rows, kind="stable")]
        )


def place_within(group: Ints) -> Ints:
    """Each entry's number among the entries of its group, in order of appearance."""
    order = np.argsort(group, kind="stable")
    first = np.searchsorted(group[order], group[order], side="left")
    place = np.empty(len(group), dtype=np.int64)
    place[order] = np.arange(len(group)) - first
    return place


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Items that each segment of users may get; users point at their segment."""

    segment: Ints  # [U]
    eligible: NDArray[np.bool_]  # [segments, N]

    def take(self, rows: Ints) -> Eligibility:
        """The users at `rows`; the masks are shared, not copied."""
        return Eligibility(self.segment[rows], self.eligible)

    def of(self, user: Ints, item: Ints) -> NDArray[np.bool_]:
        """Whether each user may get each item; elementwise."""
        allowed: NDArray[np.bool_] = self.eligible[self.segment[user], item]
        return allowed


@dataclass(frozen=True, slots=True)
class CandidateSets:
    """Items to score, each once per set. User u's are list `of_user[u]` of `sets`.

    Shared sets belong to any number of users, and may hold items that a user must not get; those
    are scored and left out afterwards. A set of one's own holds none.
    """

    sets: Ragged  # [G] items
    of_user: Ints  # [U]
    forbidden: Ints  # [U] items of the user's set that it must not get
    shared: bool

    @classmethod
    def own(cls, lists: Ragged) -> CandidateSets:
        """A set per user."""
        of_user = np.arange(lists.num_rows, dtype=np.int64)
        return cls(lists, of_user, np.zeros_like(of_user), shared=False)

    @property
    def lengths(self) -> Ints:
        """Items of each user's set `[U]`."""
        return self.sets.lengths[self.of_user]

    @property
    def scorable(self) -> Ints:
        """Items of each user's set that it may get `[U]`."""
        return self.lengths - self.forbidden

    def lists(self) -> Ragged:
        """Each user's candidates, written out `[U]`."""
        return self.sets.take(self.of_user)

    def take(self, rows: Ints) -> CandidateSets:
        """The users at `rows`. Sets are shared, not copied."""
        return CandidateSets(self.sets, self.of_user[rows], self.forbidden[rows], self.shared)


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of each user: lists of positions in `names`, which are token texts or ids."""

    names: tuple[str | int | None, ...]
    of_user: Ragged  # [U]

    def take(self, rows: Ints) -> Labels:
        """The users at `rows`."""
        return Labels(self.names, self.of_user.take(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class UserBatch:
    """Users as the engine sees them: valid, joined, and by catalog position."""

    num_users: int
    vectors: NDArray[np.float32] | None = None  # [U, D]
    history: Ragged | None = None  # items, latest last
    user_sids: Ragged | None = None  # codes, one per level of the SID space
    texts: Mapping[str, list[str]] = field(default_factory=dict)  # column -> [U]
    candidates: CandidateSets | None = None
    labels: Labels | None = None  # asked about each candidate
    excluded: Ragged | None = None  # items never to return
    eligibility: Eligibility | None = None  # None: everything is eligible
    k: Ints | None = None  # [U] items wanted; None: as many for all

    def take(self, rows: Ints) -> UserBatch:
        """The users at `rows`, in that order."""

        def ragged(value: Ragged | None) -> Ragged | None:
            return None if value is None else value.take(rows)

        return UserBatch(
            num_users=len(rows),
            vectors=None if self.vectors is None else self.vectors[rows],
            history=ragged(self.history),
            user_sids=ragged(self.user_sids),
            texts={name: [values[r] for r in rows] for name, values in self.texts.items()},
            candidates=None if self.candidates is None else self.candidates.take(rows),
            labels=None if self.labels is None else self.labels.take(rows),
            excluded=ragged(self.excluded),
            eligibility=self.eligibility.take(rows) if self.eligibility else None,
            k=None if self.k is None else self.k[rows],
        )


@dataclass(frozen=True, slots=True)
class Rejection:
    """A row that cannot be used: which user of the batch, the rule it broke, and why."""

    user: int
    rule: str
    message: str


def join_labels(parts: list[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    """Label scores below one another, as wide as the widest."""
    arrays = [part for part in parts if part is not None]
    if not arrays:
        return None
    most = max(part.shape[1] for part in arrays)
    wide = [
        np.pad(part, ((0, 0), (0, most - part.shape[1])), constant_values=np.nan) for part in arrays
    ]
    return np.concatenate(wide).astype(np.float32, copy=False)


def _spread(user: Ints, of: Ints, num_users: int) -> tuple[Ints, Ints]:
    """Entries (ordered by user) of every user in `of`: whose each is, and where it stands."""
    lengths = np.bincount(user, minlength=num_users)
    mine = Ragged.from_lengths(lengths, np.arange(len(user), dtype=np.int64)).take(of)
    return mine.row_ids, mine.values


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemScores:
    """Scored candidates: entry m says user `user[m]` scores `score[m]` nats on item `item[m]`."""

    user: Ints  # [M]
    item: Ints  # [M]
    score: NDArray[np.float32]  # [M]
    labels: NDArray[np.float32] | None = None  # [M, most labels] nats; NaN behind a user's own

    def spread(self, of: Ints, num_users: int) -> ItemScores:
        """See `BatchResult.spread`."""
        user, at = _spread(self.user, of, num_users)
        return ItemScores(
            user=user,
            item=self.item[at],
            score=self.score[at],
            labels=None if self.labels is None else self.labels[at],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SidBeams:
    """Generated SIDs, best first per user, and what is known about them."""

    user: Ints  # [M]
    sid: Ints  # [M]
    score: NDArray[np.float32]  # [M], nats
    pruned: NDArray[np.float32]  # [U] best score of a prefix that was dropped; -inf: none was
    legal_mass: NDArray[np.float32]  # [U] probability that the first token stays in the catalog
    width: Ints  # [U] widest level that was forwarded

    def spread(self, of: Ints) -> SidBeams:
        """See `BatchResult.spread`."""
        user, at = _spread(self.user, of, len(self.pruned))
        return SidBeams(
            user=user,
            sid=self.sid[at],
            score=self.score[at],
            pruned=self.pruned[of],
            legal_mass=self.legal_mass[of],
            width=self.width[of],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """Everything the engine says about one batch of users."""

    num_users: int
    scored: ItemScores | None
    generated: SidBeams | None
    failed: NDArray[np.bool_]  # [U] no score where one was needed: nothing of it may be used
    rows: Ints  # [U] rows forwarded through the model for this user, the prompt's included
    rows_naive: Ints  # [U] rows if every candidate and every beam sent the prompt again
    native: NativeBeams | None = None  # where generated items come from the engine's own beams
    search: SearchWork | None = None  # None: everything was scored, nothing searched

    @classmethod
    def join(cls, parts: list[BatchResult]) -> BatchResult:
        """The results of batches one after another, as one."""
        if len(parts) == 1:
            return parts[0]
        starts = np.cumsum([0, *(part.num_users for part in parts)])

        def joined(name: str, field: str) -> NDArray[Any]:
            return np.concatenate([getattr(getattr(part, name), field) for part in parts])

        def users(name: str) -> Ints:
            pairs = zip(parts, starts, strict=False)
            return np.concatenate([getattr(part, name).user + start for part, start in pairs])

        scored = generated = None
        if parts[0].scored is not None:
            scored = ItemScores(
                user=users("scored"),
                item=joined("scored", "item"),
                score=joined("scored", "score"),
                labels=join_labels([part.scored.labels for part in parts if part.scored]),
            )
        if parts[0].generated is not None:
            names = ("sid", "score", "pruned", "legal_mass", "width")
            arrays = {name: joined("generated", name) for name in names}
            generated = SidBeams(user=users("generated"), **arrays)
        return cls(
            num_users=int(starts[-1]),
            scored=scored,
            generated=generated,
            failed=np.concatenate([part.failed for part in parts]),
            rows=np.concatenate([part.rows for part in parts]),
            rows_naive=np.concatenate([part.rows_naive for part in parts]),
            native=NativeBeams.total(part.native for part in parts),
            search=SearchWork.join([(part.num_users, part.search) for part in parts]),
        )

    def spread(self, of: Ints) -> BatchResult:
        """The result of users of whom user u is the one at `of[u]` here; computed once, it is given
        to each. Rows count for the first.
        """
        first = np.zeros(len(of), dtype=bool)
        first[np.unique(of, return_index=True)[1]] = True
        return BatchResult(
            num_users=len(of),
            scored=None if self.scored is None else self.scored.spread(of, self.num_users),
            generated=None if self.generated is None else self.generated.spread(of),
            failed=self.failed[of],
            rows=np.where(first, self.rows[of], 0),
            rows_naive=self.rows_naive[of],
            native=self.native,
            search=None if self.search is None else self.search.take(of),
        )

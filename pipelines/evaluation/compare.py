"""What differs between the lists of two runs: of another model, precision, norm, backend or night.

Users are compared one by one, shard after shard, so that the runs may be larger than memory. Where
they are cut into different numbers of shards, the second is cut again as the first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from pipelines.evaluation.agreement import CommonItems, Floats
from pipelines.inputs.by_shard import ByShard, Segments, depths, staged_rows
from pipelines.inputs.shard_columns import scan
from pipelines.shards.profile import task_kind
from pipelines.storage import files
from schemas.errors import ConfigError
from schemas.evaluations import (
    Agreement,
    Comparison,
    ItemChange,
    ScoreShift,
    SegmentChange,
    UserChange,
)
from schemas.gates import GateResult, threshold
from schemas.runs import RunPlan, ShardReceipt

_MOST_SEGMENTS = 1000
_DEEPEST = 5000
_KEPT = 1 << 22  # score differences kept for the median


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a comparison must keep to; None: any."""

    min_overlap: float | None = None  # at the largest k
    min_rbo: float | None = None
    min_tau: float | None = None
    max_score_shift: float | None = None  # mean of the absolute differences
    max_item_churn: float | None = None
    max_users_lost: float | None = None  # share of A's users with a list


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """How to compare."""

    k: tuple[int, ...] | None = None  # None: those of 1, 5, 10, 20 that fit both
    rbo_p: float = 0.9
    by: str | None = None
    users: str | None = None  # the table with that column; None: run B's own
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """A run that has all its receipts."""

    plan: RunPlan
    receipts: list[ShardReceipt]


def compare_runs(
    a: ScoredRun,
    b: ScoredRun,
    options: CompareOptions,
    progress: Callable[[int], None] = lambda users: None,
) -> Comparison:
    """Compare B with A; `progress` is told how many users of A more are done.

    Raises:
        ConfigError: ids of different types, a cut-off that lists are too short for, an unknown
            --by column.
        StorageError: a file of a run is gone.
    """
    for name, mine, theirs in (
        ("user_id", a.plan.user_id_type, b.plan.user_id_type),
        ("item_id", a.plan.item_id_type, b.plan.item_id_type),
    ):
        if mine != theirs:
            raise ConfigError(
                f"the runs' {name} differ in type, so that none would meet",
                expected=f"{mine}, as in {a.plan.run_id}",
                got=f"{theirs} in {b.plan.run_id}",
            )
    with tempfile.TemporaryDirectory(prefix="nightshelf-compare-") as folder:
        both = _Comparer(a, b, options, Path(folder))
        for receipt in sorted(a.receipts, key=lambda one: one.shard):
            both.add(receipt)
            progress(receipt.counts.users_in)
        return both.verdict()


@dataclass(slots=True)
class _Tally:
    """What is known of some users so far."""

    users: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("a", "b", "both", "same_list"), 0)
    )
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, values: Floats) -> None:
        """Values of users; NaN where one has none."""
        there = values[~np.isnan(values)]
        self.sums[name] = self.sums.get(name, 0.0) + float(there.sum())
        self.counts[name] = self.counts.get(name, 0) + len(there)

    def mean(self, name: str) -> float | None:
        """Mean over the users that have one."""
        return self.sums[name] / self.counts[name] if self.counts.get(name) else None

    def change(self) -> UserChange:
        """The users."""
        found = self.users
        gained, lost = found["b"] - found["both"], found["a"] - found["both"]
        return UserChange(**found, gained=gained, lost=lost)

    def agreement(self, ks: tuple[int, ...]) -> Agreement:
        """The means."""
        return Agreement(
            overlap={k: self.mean(f"overlap@{k}") for k in ks},
            rbo=self.mean("rbo"),
            tau=self.mean("tau"),
            tau_users=self.counts.get("tau", 0),
        )


class _Shifts:
    """Score differences: sums of all, and an even sample for the median."""

    def __init__(self) -> None:
        self._count, self._sum, self._abs, self._most = 0, 0.0, 0.0, 0.0
        self._every, self._kept = 1, np.empty(0)

    def add(self, values: Floats) -> None:
        """More of them."""
        if not len(values):
            return
        first = -self._count % self._every  # every n-th of all, wherever a shard begins
        self._kept = np.concatenate([self._kept, values[first :: self._every]])
        while len(self._kept) > _KEPT:
            self._kept, self._every = self._kept[::2], self._every * 2
        self._count += len(values)
        self._sum += float(values.sum())
        self._abs += float(np.abs(values).sum())
        self._most = max(self._most, float(np.abs(values).max()))

    def result(self) -> ScoreShift:
        """What they come to."""
        none = self._count == 0
        return ScoreShift(
            pairs=self._count,
            mean=None if none else self._sum / self._count,
            median=None if none else float(np.median(self._kept)),
            mean_abs=None if none else self._abs / self._count,
            max_abs=None if none else self._most,
        )


class _Comparer:
    """Adds up shards."""

    def __init__(self, a: ScoredRun, b: ScoredRun, options: CompareOptions, folder: Path) -> None:
        self._a, self._b, self._options = a, b, options
        wanted = options.k
        if wanted is None:  # those of the run with the shorter lists
            shorter = min((a.plan, b.plan), key=lambda plan: plan.config.task.k)
            wanted = depths(shorter, None)
        self._folder = folder
        self._ks = depths(a.plan, wanted)
        depths(b.plan, wanted)
        if self._ks[-1] > _DEEPEST:  # tau looks at each pair of items
            raise ConfigError(f"--k {self._ks[-1]} is too deep", expected=f"at most {_DEEPEST}")
        self._of_b = {receipt.shard: receipt for receipt in b.receipts}
        self._cut: ByShard | None = None
        if not _cut_alike(a.plan, b.plan):
            paths = [files.join(b.plan.run_dir, r.result.path) for r in b.receipts]
            self._cut = ByShard(self._rows_of_b(), a.plan, folder / "b", "staged rows", paths)
        self._segments: list[Segments] = []
        if options.by is not None:
            plans = [b.plan]
            if options.users is None and _users_of(a.plan) != _users_of(b.plan):
                plans.append(a.plan)  # it knows those that B lost
            self._segments = [
                Segments(plan, options.by, options.users, folder / f"users-{number}", a.plan)
                for number, plan in enumerate(plans)
            ]
        self._all, self._by_segment = _Tally(), dict[str | None, _Tally]()
        self._shifts = _Shifts()
        self._shown: pl.DataFrame | None = None

    def _rows_of_b(self) -> pl.LazyFrame:
        """All rows of B, from the disk or from a store, a shard at a time."""
        plan, depth = self._b.plan, self._ks[-1]
        if files.local_path(plan.run_dir) is None:
            copies = []
            for receipt in self._b.receipts:
                copy = self._folder / f"b-{receipt.shard:05d}.parquet"
                staged_rows(plan, receipt, depth).write_parquet(copy)
                copies.append(str(copy))
        else:
            copies = [files.join(plan.run_dir, r.result.path) for r in self._b.receipts]
        columns = ["user_id", "rank", "item_id", "score"]
        return pl.concat(
            [scan(path).select(columns).filter(pl.col("rank") <= depth) for path in copies]
        )

    def add(self, receipt: ShardReceipt) -> None:
        """Compare the users of one shard."""
        a = staged_rows(self._a.plan, receipt, self._ks[-1])
        if self._cut is None:
            b = staged_rows(self._b.plan, self._of_b[receipt.shard], self._ks[-1])
        else:
            b = self._cut.shard(receipt.shard)
        self._note_items(a, b)
        users = _lengths(a, "a").join(_lengths(b, "b"), on="user_id", how="full", coalesce=True)
        users = users.sort("user_id")
        self._add_users(self._all, users, a, b)
        if not self._segments:
            return
        found = [one.of(receipt.shard, users["user_id"]) for one in self._segments]
        users = users.with_columns(pl.coalesce(*found).alias("segment"))
        segment = users["segment"]
        for value in segment.unique().to_list():
            tally = self._by_segment.setdefault(value, _Tally())
            mine = users.filter(pl.col("segment").eq_missing(pl.lit(value, dtype=pl.String)))
            self._add_users(tally, mine, a, b)
        if len(self._by_segment) > _MOST_SEGMENTS:
            raise ConfigError(
                f"--by {self._options.by} has too many values",
                expected=f"at most {_MOST_SEGMENTS}",
                do="Choose a column of fewer values.",
            )

    def _add_users(
        self, tally: _Tally, users: pl.DataFrame, a: pl.DataFrame, b: pl.DataFrame
    ) -> None:
        both = users.drop_nulls(["a", "b"]).with_columns(
            pl.int_range(pl.len(), dtype=pl.Int64).alias("u")
        )
        tally.users["a"] += users["a"].count()
        tally.users["b"] += users["b"].count()
        tally.users["both"] += len(both)
        if both.is_empty():
            return
        common = _common(both, a, b)
        tally.users["same_list"] += int(common.same_list().sum())
        for k in self._ks:
            tally.add(f"overlap@{k}", common.overlap(k))
        tally.add("rbo", common.rbo(self._options.rbo_p))
        tally.add("tau", common.tau())
        if tally is self._all:
            self._shifts.add(common.score_b - common.score_a)

    def _note_items(self, a: pl.DataFrame, b: pl.DataFrame) -> None:
        """How often each item is shown in either run."""
        parts = [
            frame.group_by("item_id").agg(pl.len().cast(pl.Int64).alias(name))
            for name, frame in (("a", a), ("b", b))
        ]
        known = [] if self._shown is None else [self._shown]
        joined = pl.concat([*known, *parts], how="diagonal")
        self._shown = joined.group_by("item_id").agg(pl.sum("a", "b"))

    def _items(self) -> ItemChange:
        assert self._shown is not None, "a run has a shard"
        a, b = (self._shown[name].to_numpy() for name in ("a", "b"))
        either, both = int(((a > 0) | (b > 0)).sum()), int(((a > 0) & (b > 0)).sum())
        moved = None
        if a.sum() and b.sum():
            moved = float(np.abs(a / a.sum() - b / b.sum()).sum() / 2)
        return ItemChange(
            a=int((a > 0).sum()),
            b=int((b > 0).sum()),
            gained=int(((a == 0) & (b > 0)).sum()),
            lost=int(((a > 0) & (b == 0)).sum()),
            churn=1 - both / either if either else None,
            exposure_shift=moved,
        )

    def verdict(self) -> Comparison:
        """Everything added up, and held against the limits."""
        same_scores = task_kind(self._a.plan.config) == task_kind(self._b.plan.config)
        segments = sorted(self._by_segment.items(), key=lambda kv: (kv[0] is None, kv[0] or ""))
        found = Comparison(
            run_a=self._a.plan.run_id,
            run_b=self._b.plan.run_id,
            k=self._ks,
            rbo_p=self._options.rbo_p,
            users=self._all.change(),
            agreement=self._all.agreement(self._ks),
            score_shift=self._shifts.result() if same_scores else None,
            items=self._items(),
            by=self._options.by,
            segments=tuple(
                SegmentChange(segment=name, users=t.change(), agreement=t.agreement(self._ks))
                for name, t in segments
            ),
        )
        return found.model_copy(update={"gates": _gates(found, self._options.limits)})


def _cut_alike(a: RunPlan, b: RunPlan) -> bool:
    """Whether a user is in the same shard of both runs."""
    if a.config.inputs.self_contained or b.config.inputs.self_contained:
        return a.inputs["users"] == b.inputs["users"] and a.config.inputs == b.config.inputs
    return a.num_shards == b.num_shards


def _users_of(plan: RunPlan) -> list[str]:
    return [file.path for file in plan.inputs["users"].files]


def _lengths(rows: pl.DataFrame, name: str) -> pl.DataFrame:
    return rows.group_by("user_id").agg(pl.len().cast(pl.Int64).alias(name))


def _common(users: pl.DataFrame, a: pl.DataFrame, b: pl.DataFrame) -> CommonItems:
    """The items that both lists of each user `[U]` hold."""
    rows = (
        users.select("user_id", "u")
        .join(a, on="user_id")
        .join(b, on=["user_id", "item_id"], suffix="_b")
        .sort("u", "rank")
    )
    return CommonItems(
        length_a=users["a"].to_numpy(),
        length_b=users["b"].to_numpy(),
        user=rows["u"].to_numpy(),
        rank_a=rows["rank"].cast(pl.Int64).to_numpy(),
        rank_b=rows["rank_b"].cast(pl.Int64).to_numpy(),
        score_a=rows["score"].cast(pl.Float64).to_numpy(),
        score_b=rows["score_b"].cast(pl.Float64).to_numpy(),
    )


def _gates(found: Comparison, limits: Limits) -> tuple[GateResult, ...]:
    """The limits that were given. What could not be measured does not hold."""
    k, shift, alike = found.k[-1], found.score_shift, found.agreement
    lost = found.users.lost / found.users.a if found.users.a else None

    def exact(value: float | None) -> float | None:
        """A mean of ones may end up at 1 - 1e-16."""
        return None if value is None else round(value, 12)

    gates = (
        threshold(
            "overlap", exact(alike.overlap[k]), f"mean overlap@{k}", least=limits.min_overlap
        ),
        threshold("rbo", exact(alike.rbo), "mean rank-biased overlap", least=limits.min_rbo),
        threshold("tau", exact(alike.tau), "mean Kendall tau-b", least=limits.min_tau),
        threshold(
            "score_shift",
            shift.mean_abs if shift else None,
            "mean absolute difference of scores",
            most=limits.max_score_shift,
        ),
        threshold(
            "item_churn", found.items.churn, "items not in both runs", most=limits.max_item_churn
        ),
        threshold("users_lost", lost, "share of A's users", most=limits.max_users_lost),
    )
    return tuple(
        gate if gate.value is not None else gate.model_copy(update={"passed": False})
        for gate in gates
        if gate.allowed != "any"
    )

"""Judge a run's lists by what users turned to later, beside baselines over the same items.

Everything is at the level of items: of items that share a semantic ID, only the one in the truth is
a hit, at the rank it has in the list. Rows are those that the run's receipts name, one shard at a
time.

The metrics are means over all users of the truth, or over those of the run where that is asked for.
One without a list counts as 0, whatever the reason; users without truth are left out. Both are
counted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pipelines.catalog.build import is_saved
from pipelines.catalog.items import catalog_dir, open_items
from pipelines.evaluation.baselines import Pool, pools, popular, random, reachable
from pipelines.evaluation.metrics import (
    Floats,
    UserTruth,
    metric_names,
    self_information,
    user_metrics,
)
from pipelines.evaluation.resampling import Means, chunks, draw
from pipelines.evaluation.truth import Truth, read_interactions
from pipelines.inputs.by_shard import Segments, depths, shard_users, staged_rows
from pipelines.inputs.prepared import shards_of
from pipelines.inputs.read_batches import read_shard
from pipelines.sources.frames import read_frame
from pipelines.storage import files
from schemas.errors import ConfigError, InputError
from schemas.evaluations import (
    Estimate,
    Evaluation,
    Metrics,
    SegmentQuality,
    TruthFound,
    UsersFound,
)
from schemas.requests import Ints, Ragged
from schemas.runs import RunPlan, ShardReceipt

METHODS = ("run", "popularity", "random")
_MOST_SEGMENTS = 1000
_MOST_CELLS = 1 << 28  # segments x items, for coverage
_MOST_MEANS = 1 << 25  # segments x samples x metrics
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """How lists are held against the truth."""

    k: tuple[int, ...] | None = None  # cut-offs; None: those of 1, 5, 10, 20 that fit
    by: str | None = None  # a users column: the metrics of each of its values as well
    users: str | None = None  # the table with that column; None: the run's own
    train: str | None = None  # past interactions, for popularity; None: the catalog's column
    bootstrap: int = 1000  # samples; 0: no intervals
    seed: int = 0
    only_run_users: bool = False  # leave out users of the truth that the run was not asked for


def evaluate_run(
    plan: RunPlan,
    receipts: list[ShardReceipt],
    truth: str,
    options: EvaluateOptions,
    progress: Callable[[int], None] = lambda users: None,
) -> Evaluation:
    """Judge a run that has all its receipts; `progress` is told how many users more are done.

    Raises:
        ConfigError: a cut-off that the lists are too short for, an unknown --by column.
        TableError: the truth breaks its contract; its ids are of another type.
        InputError: the truth has no user, or no item, of the run.
        StorageError: a file of the run is gone.
    """
    with tempfile.TemporaryDirectory(prefix="nightshelf-evaluate-") as folder:
        evaluator = _Evaluator(plan, truth, options, Path(folder))
        for receipt in sorted(receipts, key=lambda one: one.shard):
            evaluator.add(receipt)
            progress(receipt.counts.users_in)
        return evaluator.verdict()


@dataclass(slots=True)
class _Tally:
    """What is known of some users so far."""

    means: Means
    best: dict[str, NDArray[np.int32]]  # [N] best place each item had, by method


@dataclass(frozen=True, slots=True)
class _ShardUsers:
    """The users of a shard that have truth, sorted, and all that is asked about them."""

    ids: pl.Series  # [U]
    truth: UserTruth
    lists: dict[str, Ints]  # [U, K] catalog positions, by method


class _Evaluator:
    """Adds up shards."""

    def __init__(self, plan: RunPlan, truth: str, options: EvaluateOptions, folder: Path) -> None:
        self._plan, self._options = plan, options
        self._ks = depths(plan, options.k)
        if not is_saved(catalog_dir(plan)):
            raise ConfigError(
                "the run's catalog is not in its folder any more",
                where=plan.run_dir,
                do="`nightshelf prepare` with this folder makes it again.",
            )
        catalog = open_items(plan)
        assert catalog is not None, "recommendations need a catalog"
        self._catalog, self._num_items = catalog, len(catalog.table)
        self._popularity, self._popularity_from = self._find_popularity()
        self._information = None
        if self._popularity is not None:
            self._information = self_information(self._popularity)
        weight = np.zeros(self._num_items) if self._popularity is None else self._popularity
        self._order = np.lexsort((np.arange(self._num_items), -weight)).astype(np.int64)
        self._truth = Truth(plan, truth, folder / "truth")
        self._segments = None
        if options.by is not None:
            self._segments = Segments(plan, options.by, options.users, folder / "users")
        self._methods = tuple(m for m in METHODS if m != "popularity" or self._popularity_from)
        self._all = self._tally()
        self._by_segment: dict[str | None, _Tally] = {}
        self._found = dict.fromkeys(("in_run", "with_list", "run", "unknown", "reachable"), 0)

    def _tally(self) -> _Tally:
        width = len(metric_names(self._ks)) * len(self._methods)
        best = {m: np.full(self._num_items, _NEVER, dtype=np.int32) for m in self._methods}
        return _Tally(Means(width, self._options.bootstrap), best)

    def _find_popularity(self) -> tuple[Floats | None, str | None]:
        """Interactions of each item, and who says so."""
        train = self._options.train
        if train is not None:
            frame = read_interactions(self._plan, train, "train").drop_nulls()
            counts = frame.group_by("item_id").len().collect(engine="streaming")
            at = self._positions(counts["item_id"])
            popularity = np.zeros(self._num_items)
            popularity[at[at >= 0]] = counts["len"].to_numpy()[at >= 0]
            if not popularity.any():
                raise InputError("train: no item is in the run's catalog", where=train)
            return popularity, train
        popularity = np.maximum(self._catalog.popularity, 0.0)
        if not popularity.any():
            return None, None
        return popularity, "catalog"

    def _positions(self, ids: pl.Series) -> Ints:
        return self._catalog.positions(ids.to_arrow().cast(self._catalog.item_ids.type))

    def add(self, receipt: ShardReceipt) -> None:
        """Judge the users of one shard."""
        pairs = self._truth.of_shard(receipt.shard)
        everyone = shard_users(self._plan, receipt.shard)
        self._found["run"] += len(everyone)
        if self._options.only_run_users:
            pairs = pairs.filter(pl.col("user_id").is_in(everyone.implode()))
        if pairs.is_empty():
            return
        users = self._users(receipt, pairs)
        self._found["in_run"] += int(users.ids.is_in(everyone.implode()).sum())
        self._found["with_list"] += int((users.lists["run"][:, 0] >= 0).sum())
        self._found["unknown"] += int((users.truth.items.values < 0).sum())
        values = np.concatenate(
            [
                user_metrics(
                    users.lists[m], users.truth, self._ks, self._information, self._num_items
                )
                for m in self._methods
            ],
            axis=1,
        )
        self._add_values(receipt.shard, users, values)

    def _users(self, receipt: ShardReceipt, pairs: pl.DataFrame) -> _ShardUsers:
        """Lists and truth of the shard's users, by catalog position."""
        ids = pairs["user_id"].unique(maintain_order=True)
        lengths = pairs.group_by("user_id", maintain_order=True).len()["len"].to_numpy()
        items = Ragged.from_lengths(lengths, self._positions(pairs["item_id"]))
        truth = UserTruth(items, pairs["weight"].to_numpy())
        numbered = ids.to_frame("user_id").with_columns(
            pl.int_range(pl.len(), dtype=pl.Int64).alias("u")
        )
        rows = staged_rows(self._plan, receipt, self._ks[-1]).join(numbered, on="user_id")
        lists = np.full((len(ids), self._ks[-1]), -1, dtype=np.int64)
        at = (rows["u"].to_numpy(), rows["rank"].to_numpy() - 1)
        lists[at] = self._positions(rows["item_id"])
        return _ShardUsers(ids, truth, {"run": lists, **self._baselines(receipt, ids, truth)})

    def _baselines(
        self, receipt: ShardReceipt, ids: pl.Series, truth: UserTruth
    ) -> dict[str, Ints]:
        """Lists that need no model; empty for users that the run could not read either."""
        shard = shards_of(self._plan)[receipt.shard]
        data = read_shard(self._plan, shard, self._catalog)
        at = pl.from_arrow(data.user_ids)
        assert isinstance(at, pl.Series), "an array is a series"
        # Users that only the engine could refuse (a prompt too long, a score that is no number)
        # have no outcome.
        outcomes = files.join(self._plan.run_dir, receipt.files["outcomes"].path)
        found = (
            ids.to_frame("user_id")
            .with_row_index("u")
            .join(at.to_frame("user_id").with_row_index("row"), on="user_id")
            .join(read_frame(outcomes, ["user_id"]), on="user_id", how="semi")
            .sort("u")
        )
        place, rows = found["u"].to_numpy(), found["row"].to_numpy().astype(np.int64)
        batch, wanted = data.users.take(rows), data.k[rows]
        width = self._ks[-1]
        rng = np.random.default_rng([self._options.seed, receipt.shard, 1])
        out = {m: np.full((len(ids), width), -1, dtype=np.int64) for m in METHODS[1:]}
        relevant = truth.items.take(place.astype(np.int64))
        for pool in pools(batch, self._catalog, self._plan.config.task, self._order):
            out["popularity"][place[pool.users]] = popular(pool, wanted[pool.users], width)
            out["random"][place[pool.users]] = random(pool, wanted[pool.users], width, rng)
            self._found["reachable"] += self._reachable(pool, relevant.take(pool.users))
        return {m: out[m] for m in self._methods if m != "run"}

    def _reachable(self, pool: Pool, relevant: Ragged) -> int:
        known = relevant.keep(relevant.values >= 0)
        return int(reachable(pool, known.row_ids, known.values, self._num_items).sum())

    def _add_values(self, shard: int, users: _ShardUsers, values: Floats) -> None:
        groups = self._groups(shard, users.ids)
        for tally, mask in groups:
            for method in self._methods:
                _note_best(tally.best[method], users.lists[method][mask])
        resamples = self._options.bootstrap
        for number, part in enumerate(chunks(len(users.ids), resamples)):
            seed = [self._options.seed, shard, 2, number]
            drawn = draw(part.stop - part.start, resamples, seed)
            for tally, mask in groups:
                inside = mask[part]
                tally.means.add(values[part][inside], drawn[:, inside])

    def _groups(self, shard: int, ids: pl.Series) -> list[tuple[_Tally, NDArray[np.bool_]]]:
        """Everybody, and the users of each segment."""
        groups = [(self._all, np.ones(len(ids), dtype=bool))]
        if self._segments is None:
            return groups
        segment = self._segments.of(shard, ids)
        for value in segment.unique().to_list():
            if value not in self._by_segment:
                self._by_segment[value] = self._tally()
                self._check_segments()
            inside = segment.is_null() if value is None else segment.eq_missing(value)
            groups.append((self._by_segment[value], inside.to_numpy()))
        return groups

    def _check_segments(self) -> None:
        items = self._num_items * len(self._methods)
        means = self._all.means.cells
        most = max(1, min(_MOST_SEGMENTS, _MOST_CELLS // items, _MOST_MEANS // means))
        if len(self._by_segment) > most:
            raise ConfigError(
                f"--by {self._options.by} has too many values",
                expected=f"at most {most} with {self._num_items:,} items and "
                f"{self._options.bootstrap:,} samples",
                do="Choose a column of fewer values, or a smaller --bootstrap.",
            )

    def verdict(self) -> Evaluation:
        """Everything added up."""
        options, found = self._options, self._found
        self._check_overlap()
        segments = sorted(self._by_segment.items(), key=lambda kv: (kv[0] is None, kv[0] or ""))
        return Evaluation(
            run_id=self._plan.run_id,
            ds=self._plan.ds,
            surface=self._plan.surface,
            task=self._plan.config.task.model_dump(mode="json", exclude_none=True),
            hashes=self._plan.hashes,
            k=self._ks,
            bootstrap=options.bootstrap,
            seed=options.seed,
            popularity_from=self._popularity_from,
            users=UsersFound(
                with_truth=self._all.means.users,
                in_run=found["in_run"],
                with_list=found["with_list"],
                without_truth=found["run"] - found["in_run"],
            ),
            truth=TruthFound(
                path=self._truth.path,
                rows=self._truth.rows,
                rows_null=self._truth.rows_null,
                rows_weightless=self._truth.rows_weightless,
                rows_repeated=self._truth.rows_repeated,
                pairs=self._truth.pairs,
                pairs_unknown=found["unknown"],
                pairs_reachable=found["reachable"],
            ),
            methods=self._metrics(self._all),
            differences=self._differences(),
            by=options.by,
            segments=tuple(
                SegmentQuality(segment=name, users=t.means.users, methods=self._metrics(t))
                for name, t in segments
            ),
        )

    def _check_overlap(self) -> None:
        """Ids of one type that never meet are a mistake, and not a bad model."""
        if not self._found["in_run"]:
            raise InputError(
                "no user of the truth is in the run",
                got=f"{self._all.means.users:,} users with truth, "
                f"{self._found['run']:,} in the run",
                where=self._truth.path,
                do="Compare the ids of both tables, spaces and leading zeros included.",
            )
        if self._found["unknown"] == self._truth.pairs:
            raise InputError(
                "no item of the truth is in the run's catalog",
                got=f"{self._truth.pairs:,} pairs of user and item",
                where=self._truth.path,
                do="Compare the ids of both tables, spaces and leading zeros included.",
            )

    def _metrics(self, tally: _Tally) -> dict[str, Metrics]:
        """Each method's metrics, with coverage, which is of a set of users and has no mean."""
        names = metric_names(self._ks)
        found = tally.means.estimates()
        out: dict[str, Metrics] = {}
        for number, method in enumerate(self._methods):
            mine = found[number * len(names) : (number + 1) * len(names)]
            out[method] = dict(zip(names, mine, strict=True))
            for k in self._ks:
                share = float((tally.best[method] < k).sum()) / self._num_items
                out[method][f"coverage@{k}"] = Estimate(value=share)
        return out

    def _differences(self) -> dict[str, Metrics]:
        names, out = metric_names(self._ks), {}
        for number, method in enumerate(self._methods[1:], start=1):
            these = slice(number * len(names), (number + 1) * len(names))
            found = self._all.means.differences(slice(0, len(names)), these)
            out[method] = dict(zip(names, found, strict=True))
        return out


def _note_best(best: NDArray[np.int32], lists: Ints) -> None:
    """Keep the best place that each item has in any list."""
    for place in range(lists.shape[1]):
        items = lists[:, place]
        items = items[items >= 0]
        best[items] = np.minimum(best[items], place)

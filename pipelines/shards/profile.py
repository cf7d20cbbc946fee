"""What a run's lists look like: a few numbers and a sample of users, kept when staged files go.

The sample holds the users whose hashed id is below a threshold, so that two runs sample the same
users, whatever else is in them, and their lists can be compared.

Source of the population stability index: the sum over bins of (p - q) ln(p / q), p and q the shares
of two populations in the deciles of the first (Siddiqi, Credit Risk Scorecards, 2006; above 0.25 is
usually read as a shift).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import polars as pl
import xxhash

from engine.tasks import tasks_of
from pipelines.storage import files
from pipelines.storage.records import read_record
from schemas.counts import Counts
from schemas.markers import Marker
from schemas.records import Stored
from schemas.runs import RunPlan
from schemas.settings import RunConfig

_USERS = 10_000  # in a sample
_SEED = 42
_BINS = 10
_NEW = 10.0  # drift from nothing to something: more than any other
_LEAST_SHARE = 1e-4  # of a bin, so that an empty one does not count as infinite


class RunProfile(Stored):
    """A run in a few numbers; its sample is in the file beside it."""

    NAME: ClassVar[str] = "a run's profile"

    run_id: str
    ds: str
    surface: str
    rows: int
    users: int
    below: int  # users whose hash is below are in the sample


class ProfileBuilder:
    """Collects the sample of a run, shard by shard."""

    def __init__(self, plan: RunPlan, counts: Counts) -> None:
        users = counts.users_recommended
        below = (1 << 64) - 1 if users <= _USERS else (1 << 64) * _USERS // users
        self.profile = RunProfile(
            run_id=plan.run_id,
            ds=plan.ds,
            surface=plan.surface,
            rows=counts.rows_staged,
            users=users,
            below=below,
        )
        self._frames: list[pl.DataFrame] = []

    def add(self, rows: pl.DataFrame) -> None:
        """Rows of one shard: `user_id, rank, item_id, score`."""
        users = rows.filter(pl.col("rank") == 1)["user_id"]
        kept = users.filter(pl.Series(user_hashes(users) < self.profile.below, dtype=pl.Boolean))
        chosen = rows.filter(pl.col("user_id").is_in(kept.implode()))
        self._frames.append(chosen.select("user_id", "rank", "item_id", "score"))

    def save(self, plan: RunPlan) -> pl.DataFrame:
        """Write profile and sample into the run folder; the sample."""
        sample = pl.concat(self._frames)
        files.write_parquet(_sample_path(plan.run_dir), sample.to_arrow())
        files.write_json(_profile_path(plan.run_dir), self.profile.model_dump(mode="json"))
        return sample


def user_hashes(users: pl.Series) -> np.ndarray:
    """A hash of each user id, by which samples choose; `[U]` uint64."""
    texts = users.cast(pl.String).to_list()
    digests = (xxhash.xxh64_intdigest(text.encode(), seed=_SEED) for text in texts)
    return np.fromiter(digests, dtype=np.uint64, count=len(texts))


def _profile_path(run_dir: str) -> str:
    return files.join(run_dir, "profile.json")


def _sample_path(run_dir: str) -> str:
    return files.join(run_dir, "profile.parquet")


def table_key(config: RunConfig) -> str:
    """One table among those that configurations of a work folder may publish to."""
    output = config.output
    return f"{output.format} {output.path} {output.table_name}"


def task_kind(config: RunConfig) -> str:
    """Runs of one kind have scores that can be compared."""
    return " ".join(task.kind for task in tasks_of(config)[:1])


def publish_record(plan: RunPlan, at: float) -> dict[str, object]:
    """What `published_marker` holds."""
    return Marker(
        ds=plan.ds,
        surface=plan.surface,
        table=table_key(plan.config),
        task=task_kind(plan.config),
        published_at=at,
    ).model_dump()


def published_marker(run_dir: str) -> str:
    """The file that says a run was published, and when."""
    return files.join(run_dir, "published.json")


def load_profile(run_dir: str) -> RunProfile | None:
    """The profile of a run that was audited."""
    path = _profile_path(run_dir)
    return read_record(RunProfile, path) if files.exists(path) else None


def load_sample(run_dir: str) -> pl.DataFrame | None:
    """The sample of a run that was audited: `user_id, rank, item_id, score`."""
    if not files.exists(_sample_path(run_dir)):
        return None
    sample = pl.from_arrow(files.read_parquet(_sample_path(run_dir)))
    assert isinstance(sample, pl.DataFrame), "a table is a frame"
    return sample


def score_drift(before: pl.Series, now: pl.Series) -> float:
    """Population stability index of scores `now` against those `before`."""
    if before.is_empty():
        return 0.0 if now.is_empty() else _NEW
    inner = np.quantile(before.to_numpy(), np.linspace(0, 1, _BINS + 1)[1:-1])
    edges = np.unique(inner)

    def shares(scores: pl.Series) -> np.ndarray:
        at = np.searchsorted(edges, scores.to_numpy(), side="left")
        counts = np.bincount(at, minlength=len(edges) + 1)
        return np.maximum(counts / max(len(scores), 1), _LEAST_SHARE)

    p, q = shares(now), shares(before)
    return float(((p - q) * np.log(p / q)).sum())


def overlap(before: pl.DataFrame, now: pl.DataFrame) -> tuple[float, int]:
    """Mean share of items that the lists of a user have in common, of the longer list's length;
    and over how many users that both samples hold. 0 when they hold none in common.
    """
    shares = overlaps(before, now)
    if shares.is_empty():
        return float(before.is_empty() and now.is_empty()), 0
    return float(shares.to_numpy().mean()), len(shares)


def overlaps(before: pl.DataFrame, now: pl.DataFrame) -> pl.Series:
    """That share of each user that both samples hold, 0 to 1."""
    users = before.select("user_id").unique().join(now.select("user_id").unique(), on="user_id")
    mine, theirs = (frame.join(users, on="user_id", how="semi") for frame in (now, before))
    common = (
        mine.join(theirs, on=["user_id", "item_id"], how="semi").group_by("user_id").len("both")
    )
    lengths = (
        mine.group_by("user_id")
        .len("now")
        .join(theirs.group_by("user_id").len("before"), on="user_id")
        .join(common, on="user_id", how="left")
    )
    share = pl.col("both").fill_null(0) / pl.max_horizontal("now", "before")
    return lengths.select(share.alias("overlap")).to_series()

"""What `evaluate` and `compare` find out, as the command line prints it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from schemas.gates import GateResult


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Estimate(_Record):
    """A number, and the interval that bootstrap samples of the users give it."""

    value: float | None  # None: no user has it
    low: float | None = None
    high: float | None = None


Metrics = dict[str, Estimate]  # "recall@10" -> …


class SegmentQuality(_Record):
    """The metrics of some of the users."""

    segment: str | None = Field(description="value of the --by column; null where it is null")
    users: int
    methods: dict[str, Metrics]


class TruthFound(_Record):
    """What the truth table holds."""

    path: str
    rows: int
    rows_null: int = Field(description="without user or item: left out")
    rows_weightless: int = Field(description="of weight 0, so not relevant: left out")
    rows_repeated: int = Field(description="a user's item again: the largest weight counts")
    pairs: int = Field(description="relevant items of all users; what recall divides by")
    pairs_unknown: int = Field(description="of them: the item is not in the run's catalog")
    pairs_reachable: int = Field(description="of them: the run could have recommended the item")


class UsersFound(_Record):
    """Whom the metrics are about."""

    with_truth: int = Field(description="the metrics are means over these")
    in_run: int = Field(description="of them: in the run's users table")
    with_list: int = Field(description="of them: got a list; the others count as 0")
    without_truth: int = Field(description="users of the run that are left out")

    @property
    def coverage(self) -> float:
        """Share of the users with truth that got a list."""
        return self.with_list / self.with_truth


class Evaluation(_Record):
    """How well a run's lists hold what users turned to later."""

    run_id: str
    ds: str
    surface: str
    task: dict[str, Any] = Field(description="what made the lists: norm, beams, collisions, …")
    hashes: dict[str, str] = Field(description="of the configuration, the inputs and the model")
    k: tuple[int, ...]
    bootstrap: int
    seed: int
    popularity_from: str | None = Field(description="catalog, a file, or null: not known")
    users: UsersFound
    truth: TruthFound
    methods: dict[str, Metrics] = Field(description="run, popularity, random")
    differences: dict[str, Metrics] = Field(description="run minus each baseline, paired by user")
    by: str | None = None
    segments: tuple[SegmentQuality, ...] = ()


class UserChange(_Record):
    """Users with a list, in A and in B."""

    a: int
    b: int
    both: int
    gained: int = Field(description="in B only")
    lost: int = Field(description="in A only")
    same_list: int = Field(description="the same items in the same order")


class ItemChange(_Record):
    """Items that are shown to anyone, in A and in B."""

    a: int
    b: int
    gained: int = Field(description="in B only")
    lost: int = Field(description="in A only")
    churn: float | None = Field(description="1 - items in both / items in either")
    exposure_shift: float | None = Field(
        description="share of the places in lists that other items have: total variation distance"
    )


class ScoreShift(_Record):
    """Score in B minus score in A, of items that both give a user; nats, or log-probabilities."""

    pairs: int
    mean: float | None
    median: float | None
    mean_abs: float | None
    max_abs: float | None


class Agreement(_Record):
    """How alike lists are, on average over the users that both runs have a list for."""

    overlap: dict[int, float | None] = Field(description="k -> share of items in common")
    rbo: float | None
    tau: float | None
    tau_users: int = Field(description="users with two common items that are not tied")


class SegmentChange(_Record):
    """The comparison for some of the users."""

    segment: str | None
    users: UserChange
    agreement: Agreement


class Comparison(_Record):
    """What differs between two runs."""

    run_a: str
    run_b: str
    k: tuple[int, ...]
    rbo_p: float
    users: UserChange
    agreement: Agreement
    score_shift: ScoreShift | None = Field(description="null: their scores mean different things")
    items: ItemChange
    by: str | None = None
    segments: tuple[SegmentChange, ...] = ()
    gates: tuple[GateResult, ...] = ()

    @property
    def refused(self) -> tuple[GateResult, ...]:
        """Limits that do not hold."""
        return tuple(gate for gate in self.gates if not gate.passed)

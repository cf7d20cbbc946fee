"""A run on paper: its plan, its shards, their receipts, and the manifest of it all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from schemas.counts import Counts
from schemas.gates import AuditReport
from schemas.records import Record, Stored, recorded_config
from schemas.search_work import NativeBeams
from schemas.settings import RunConfig

RunEnd = Literal["published", "failed", "refused"]


class InputFile(Record):
    """One listed input file. `version` is the etag, or size and change time where there is none."""

    path: str
    bytes: int
    rows: int
    version: str


class InputTable(Record):
    """The snapshot of an input table: the files found at plan time and nothing else."""

    name: str
    files: tuple[InputFile, ...]
    columns: dict[str, str]
    snapshot: str | None = None  # of a Delta or Iceberg table: `Delta version 12`

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(file.rows for file in self.files)


class RunPlan(Stored):
    """What a run will do. Two plans with the same `run_id` do the same work on the same inputs."""

    NAME: ClassVar[str] = "a run's plan"

    run_id: str
    ds: str
    surface: str
    config: RunConfig
    inputs: dict[str, InputTable]
    hashes: dict[str, str] = Field(
        description="Of what the run is made of: config, inputs, catalog, model and projector"
    )
    model_files: dict[str, dict[str, str]] = {}  # model, projector: version of each file
    num_shards: int
    user_id_type: Literal["string", "int64"]
    item_id_type: Literal["string", "int64"]
    vector_dim: int | None = None  # length every user vector must have
    run_dir: str
    unread: tuple[str, ...] = Field((), exclude=True)  # settings that only another release knows

    @model_validator(mode="before")
    @classmethod
    def _of_any_release(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or not isinstance(raw.get("config"), dict):
            return raw
        config, unread = recorded_config(raw["config"])
        return {**raw, "config": config, "unread": unread}


class Shard(Record):
    """The unit of work, retry and resume: a fixed, self-contained set of users."""

    index: int
    path: str

    @property
    def name(self) -> str:
        """Name used in files and messages."""
        return f"shard-{self.index:05d}"


StagedKind = Literal["recommendations", "embeddings", "outcomes", "quarantine"]


class StagedFile(Record):
    """A file a shard left in the run folder, by its path relative to that folder."""

    path: str
    rows: int
    bytes: int
    xxh3: str


class ShardReceipt(Stored):
    """Proof that a shard is done; written last."""

    NAME: ClassVar[str] = "a shard's receipt"

    run_id: str
    shard: int
    attempt: str
    files: dict[StagedKind, StagedFile]
    counts: Counts
    seconds: float
    engine_seconds: float
    finished_at: float | None = None  # seconds since 1970
    legal_mass_sum: float = 0.0
    beam_widths: dict[int, int] = {}  # widest beam used -> users
    native_beams: dict[str, int] | None = None  # counts of the engine's own beams, where used

    @property
    def result(self) -> StagedFile:
        """The file that is published."""
        kind: StagedKind = "embeddings" if "embeddings" in self.files else "recommendations"
        return self.files[kind]


def working_seconds(receipts: Iterable[ShardReceipt]) -> float:
    """Time in which at least one shard was at work: the same in one command, in steps, resumed or
    repeated. Receipts without an end are counted as one after the other.
    """
    total, reached = 0.0, float("-inf")
    spans = []
    for receipt in receipts:
        if receipt.finished_at is None:
            total += receipt.seconds
        else:
            spans.append((receipt.finished_at - receipt.seconds, receipt.finished_at))
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Published(Record):
    """What a publish made visible. A table's history is a list of these, the newest first."""

    table: str
    partition: str
    files: tuple[str, ...]
    rows: int
    run_id: str
    format: Literal["parquet", "iceberg", "delta"] = "parquet"
    version: str = ""  # generation of the pointer, Iceberg snapshot, or Delta version
    published_at: str = ""


class RunManifest(Stored):
    """Everything about a run, written when it ends."""

    NAME: ClassVar[str] = "a run's manifest"

    plan: RunPlan
    status: RunEnd
    counts: Counts
    shards: tuple[ShardReceipt, ...]
    failed_shards: dict[int, str] = {}
    audit: AuditReport | None = None
    published: Published | None = None
    published_quarantine: Published | None = None
    started_at: str
    finished_at: str
    seconds: float
    versions: dict[str, str]
    launcher: str | None = None  # what ran the shards last
    report: str | None = None  # the page; None: it could not be written

    def _legal_mass(self) -> float | None:
        """Mean probability that the first generated token stays in the catalog, where known."""
        task = self.plan.config.task
        users = self.counts.users_recommended + self.counts.users_without_eligible
        if not task.searches_catalog or task.score_norm != "full_vocab" or not users:
            return None
        if self._native() is not None:
            return None  # its beams do not tell
        return round(sum(receipt.legal_mass_sum for receipt in self.shards) / users, 4)

    def _beam_widths(self) -> dict[int, int] | None:
        """How many users were searched with which widest beam, the narrowest first."""
        if not self.plan.config.task.searches_catalog:
            return None
        widths: dict[int, int] = {}
        for receipt in self.shards:
            for width, users in receipt.beam_widths.items():
                widths[width] = widths.get(width, 0) + users
        return dict(sorted(widths.items()))

    def _native(self) -> NativeBeams | None:
        """What became of the engine's own beams; None where the run had none."""
        counts = [receipt.native_beams for receipt in self.shards]
        return NativeBeams.total(NativeBeams(**count) for count in counts if count is not None)

    def _native_summary(self) -> dict[str, Any]:
        """Shares of beams that named no item, or were no beam; and of constrained lists found."""
        native = self._native()
        if native is None:
            return {}
        unusable = native.incomplete + native.without_score + native.doubled
        return {
            "native_beams": {
                "beams": native.beams,
                "invalid_share": _share(native.invalid, native.beams),
                "unusable_share": _share(unusable, native.beams),
                "overlap_with_constrained": _share(native.in_common, native.compared),
            }
        }

    def _device_hours(self) -> float:
        """Time that shards held devices, from reading to the receipt; a worker may own several."""
        devices = self.plan.config.engine.tensor_parallel
        return devices * sum(receipt.seconds for receipt in self.shards) / 3600

    def _gate(self, name: str) -> float | None:
        """What a gate of the audit measured; None where it did not."""
        gates = self.audit.gates if self.audit else ()
        value = next((gate.value for gate in gates if gate.gate == name), None)
        return None if value is None else round(value, 4)

    def _cost(self) -> float | None:
        """What the shards cost, at `run.price_per_hour`."""
        price = self.plan.config.run.price_per_hour
        return None if price is None else price * self._device_hours()

    def summary(self) -> dict[str, Any]:
        """The one-line JSON of a run."""
        c = self.counts
        engine_seconds = sum(receipt.engine_seconds for receipt in self.shards)
        seconds = working_seconds(self.shards)
        return {
            "run_id": self.plan.run_id,
            "status": self.status,
            "ds": self.plan.ds,
            "surface": self.plan.surface,
            "users_in": c.users_in,
            "users_recommended": c.users_recommended,
            **({} if self.plan.config.task.gives_lists else {"users_embedded": c.users_embedded}),
            "users_quarantined": c.users_quarantined,
            "users_without_eligible": c.users_without_eligible,
            "candidates_in": c.candidates_in,
            "candidates_scored": c.candidates_scored,
            "rows_published": self.published.rows if self.published else 0,
            "rows_quarantined": c.rows_quarantined,
            "exact_share": _share(c.users_exact, c.users_recommended),
            "beam_widths": self._beam_widths(),
            "nodes_per_user": _ratio(c.search_nodes, c.users_searched),
            "rounds_per_user": _ratio(c.search_rounds, c.users_searched),
            "stopped_share": _share(c.users_stopped, c.users_searched),
            **self._native_summary(),
            "legal_mass": self._legal_mass(),
            "unknown_history_items": c.unknown_history_items,
            "unknown_history_share": _share(c.unknown_history_items, c.history_items),
            "history_rows_share": self._gate("history_rows"),
            "distinct_lists": self._gate("distinct_lists"),
            "row_change": self._gate("row_change"),
            "audit_warnings": [gate.gate for gate in self.audit.warned] if self.audit else [],
            "published": self.published.partition if self.published else None,
            "run_dir": self.plan.run_dir,
            "report": self.report,
            "shards": self.plan.num_shards,
            "shards_failed": len(self.failed_shards),
            "seconds": round(seconds, 3),
            "command_seconds": round(self.seconds, 3),
            "engine_seconds": round(engine_seconds, 3),
            "users_per_s": round(c.users_in / seconds, 2) if seconds else 0.0,
            "device_hours": round(self._device_hours(), 6),
            "cost": _rounded(self._cost()),
            "cost_per_million_users": _rounded(self._cost(), 1e6 / max(c.users_in, 1)),
            "prompt_tokens": c.prompt_tokens,
            "reused_tokens": c.reused_tokens,
            "truncated_tokens": c.truncated_tokens,
            "rows_forwarded": c.rows_forwarded,
            "rows_naive": c.rows_naive,
            "sharing": _share(c.rows_naive, c.rows_forwarded),
        }


def _rounded(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else round(value * factor, 4)


def _ratio(total: int, users: int) -> float | None:
    return round(total / users, 2) if users else None


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None

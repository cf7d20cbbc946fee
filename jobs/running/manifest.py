"""How a run ended: the manifest, the report and the metrics, written at every end."""

from __future__ import annotations

import datetime as dt
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from jobs.running.launcher import Progress
from jobs.running.metrics import write_metrics
from jobs.running.run_folder import launch_path, manifest_path
from pipelines.storage import files
from pipelines.storage.records import read_record
from schemas.counts import Counts
from schemas.errors import NightshelfError
from schemas.extras import missing_extra
from schemas.gates import AuditReport
from schemas.markers import Launch
from schemas.runs import Published, RunEnd, RunManifest, RunPlan, ShardReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, and what it came to."""

    status: RunEnd
    receipts: list[ShardReceipt]
    failed: dict[int, str] = field(default_factory=dict)
    audit: AuditReport | None = None
    published: Published | None = None
    quarantine: Published | None = None


_PACKAGES = (
    "nightshelf",
    "torch",
    "transformers",
    "pyarrow",
    "polars",
    "numpy",
    "tokenizers",
    "pyspark",
)


class Clock:
    """When a command started, and for how long it has run."""

    def __init__(self) -> None:
        self.started_at = dt.datetime.now(dt.UTC)
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started


def write_manifest(
    plan: RunPlan, clock: Clock, progress: Progress, outcome: Outcome
) -> RunManifest:
    """Keep how a run ended, and write its report and its metrics, which fail no run."""
    status = outcome.status
    manifest = RunManifest(
        plan=plan,
        status=status,
        counts=Counts.total(receipt.counts for receipt in outcome.receipts),
        shards=tuple(outcome.receipts),
        failed_shards=outcome.failed,
        audit=outcome.audit,
        published=outcome.published,
        published_quarantine=outcome.quarantine,
        started_at=clock.started_at.isoformat(timespec="seconds"),
        finished_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        seconds=clock.seconds,
        versions=_versions(),
        launcher=_launcher(plan),
    )
    keep_manifest(manifest)
    if status == "published":  # else the step that failed is still the one at work
        progress.step("report")
    try:
        manifest = report_of(manifest)
        if status != "published":  # what ends the command is an error, without a summary
            progress.note(f"report: {manifest.report}")
    except NightshelfError as err:  # a page: the run is what it is, whatever becomes of it
        progress.note(f"the report could not be written: {err}")
    except Exception as err:
        progress.note(f"the report could not be written: {type(err).__name__}: {err}")
    try:
        write_metrics(manifest)
    except (NightshelfError, OSError) as err:  # the run is what it is, whatever becomes of them
        progress.note(f"metrics could not be written: {err}")
    return manifest


def keep_manifest(manifest: RunManifest) -> None:
    """Write the manifest into the run's folder."""
    path = manifest_path(manifest.plan.run_dir)
    files.write_json(path, manifest.model_dump(mode="json"))


def report_of(manifest: RunManifest, users: Sequence[str] = ()) -> RunManifest:
    """Write the report of a run, and the manifest that names it.

    Raises: as `pipelines.report.write_report`, and `ConfigError` without the extra `report`.
    """
    if missing := missing_extra("report", "the report"):
        raise missing
    from pipelines.report import write_report  # loads jinja2 and matplotlib

    manifest = write_report(manifest, users)
    keep_manifest(manifest)
    return manifest


def _launcher(plan: RunPlan) -> str | None:
    path = launch_path(plan)
    return read_record(Launch, path).launcher if files.exists(path) else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

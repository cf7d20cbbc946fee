"""One run from plan to table, whatever launches its shards."""

from __future__ import annotations

import datetime as dt
import platform
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from jobs.running.ending import finish_first
from jobs.running.metrics import write_metrics
from jobs.running.repair import launch_and_repair
from jobs.running.run_lock import only_run_of
from pipelines.auditing.audit import audit_run, staged_files
from pipelines.inputs.prepared import is_prepared, shards_of
from pipelines.inputs.unchanged import check_inputs, check_model
from pipelines.planning.plan import plan_run
from pipelines.publish import check_not_withdrawn, publish_quarantine, publish_run
from pipelines.shards.profile import publish_record, published_marker
from pipelines.shards.run_shard import load_receipt
from pipelines.storage import files
from pipelines.storage.records import read_record
from schemas.errors import AuditRefusedError, NightshelfError, RunError, StorageError, quoted
from schemas.extras import missing_extra
from schemas.gates import AuditReport
from schemas.markers import Launch
from schemas.runs import (
    Counts,
    Published,
    RunEnd,
    RunManifest,
    RunPlan,
    Shard,
    ShardReceipt,
)
from schemas.settings import RunConfig

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


class Progress(Protocol):
    """What a launcher tells whoever watches."""

    def step(self, name: str) -> None:
        """A step of the run begins."""

    def start(self, users: int) -> None:
        """Scoring begins, with so many users to do."""

    def advance(self, users: int) -> None:
        """So many users more are done."""

    def note(self, message: str) -> None:
        """Something a person should know."""


class Launcher(Protocol):
    """Where the work of a run is done. Its heart is `launch`; the others are the steps beside it
    that some launchers can share out too.
    """

    def locate(self, config: RunConfig) -> RunConfig:
        """The configuration with every input as files."""

    def problems(self, config: RunConfig) -> Iterator[NightshelfError]:
        """What would keep it from a run, and can be told before one, without copying a row."""

    def prepare(self, plan: RunPlan, progress: Progress) -> None:
        """Write the catalog, the candidate sets and the shards; what is there already is kept."""

    def published(self, plan: RunPlan, progress: Progress) -> None:
        """The run's rows are visible now."""

    name: str  # as the manifest says it

    def launch(self, plan: RunPlan, shards: list[Shard], progress: Progress) -> dict[int, str]:
        """Get every shard a receipt; the reasons of those that failed, by shard."""


def manifest_path(run_dir: str) -> str:
    """Where a run's manifest is."""
    return files.join(run_dir, "manifest.json")


def plan_path(run_dir: str) -> str:
    """Where a run's plan is."""
    return files.join(run_dir, "plan.json")


def run_job(
    config: RunConfig, launcher: Launcher, progress: Progress, *, republish: bool = False
) -> RunManifest:
    """Plan, prepare, score, audit and publish. Shards that have a receipt are not scored again.

    Raises:
        ShardFailedError, RunError: some shards failed; the same command continues the run.
        AuditRefusedError: a gate refused; nothing was published.
    """
    clock = Clock()
    progress.step("plan")
    plan = plan_run(launcher.locate(config))
    with only_run_of(plan):
        if not republish:
            check_not_withdrawn(plan)
        prepare_step(plan, launcher, progress)
        score_step(plan, launcher, progress, clock)
        audit_step(plan, progress, clock)
        return publish_step(plan, launcher, progress, clock, republish=republish)


def prepare_step(plan: RunPlan, launcher: Launcher, progress: Progress) -> None:
    """Write the plan, the catalog and the shards; what is there already is kept."""
    files.write_record(plan_path(plan.run_dir), plan.model_dump(mode="json"))
    progress.step("prepare")
    launcher.prepare(plan, progress)


def score_step(plan: RunPlan, launcher: Launcher, progress: Progress, clock: Clock) -> None:
    """Get every shard of a prepared run a receipt.

    Raises:
        RunError: the run is not prepared, or some shards failed.
    """
    if not is_prepared(plan):
        raise RunError("the run is not prepared", where=plan.run_dir, do="Prepare it first.")
    shards = shards_of(plan)
    todo = [shard for shard in shards if load_receipt(plan, shard) is None]
    if len(todo) < len(shards):
        progress.note(f"{len(shards) - len(todo)} of {len(shards)} shards are done already")
    failed: dict[int, str] = {}
    if todo:
        progress.step("score")
        files.write_record(_launch_path(plan), Launch(launcher=launcher.name).model_dump())
        failed = launch_and_repair(plan, launcher, todo, progress)
    receipts = receipts_of(plan)
    missing = {s.index for s in shards} - {r.shard for r in receipts}
    for index in missing - failed.keys():
        failed[index] = "the shard left no receipt"
    if not failed:
        return
    _write_manifest(plan, clock, progress, "failed", receipts, failed=failed)
    first = min(failed)
    raise RunError(
        f"{len(failed)} of {len(shards)} shards failed",
        got=f"shard-{first:05d}: {failed[first]}",
        where=f"run {plan.run_id}",
        do="Nothing was published. Run the same command again: finished shards are kept.",
    )


def audit_step(plan: RunPlan, progress: Progress, clock: Clock) -> AuditReport:
    """Apply the gates to a run whose shards are done, and keep the report.

    Raises:
        RunError: shards are missing.
        AuditRefusedError: a gate refused.
    """
    progress.step("audit")
    receipts = all_receipts(plan)
    audit = audit_run(plan, receipts)
    files.write_record(_audit_path(plan), audit.model_dump(mode="json"))
    if audit.refused:
        _write_manifest(plan, clock, progress, "refused", receipts, audit=audit)
        raise AuditRefusedError(
            "the audit refused to publish",
            got="; ".join(gate.words() for gate in audit.refused),
            where=f"run {plan.run_id}, {plan.run_dir}",
            do="What was published before is unchanged.",
        )
    for gate in audit.warned:
        progress.note(f"audit: {gate.words()}")
    return audit


def publish_step(
    plan: RunPlan,
    launcher: Launcher,
    progress: Progress,
    clock: Clock,
    *,
    republish: bool = False,
) -> RunManifest:
    """Publish a run that its audit let pass; with `republish` also one that was taken back.

    Raises:
        ChangedError: an input or the model is not the one that was planned with.
        RunError: shards are missing, or the audit has not seen these.
        AuditRefusedError: it refused them.
        WithdrawnError: the run was taken back.
    """
    check_inputs(plan)
    check_model(plan)
    receipts = all_receipts(plan)
    audit = _passed_audit(plan, receipts)
    changed = staged_files(plan, receipts)
    if not changed.passed:
        raise AuditRefusedError(
            "staged files changed after the audit",
            got=changed.detail,
            where=plan.run_dir,
            do="Remove the receipts of these shards and score them again.",
        )
    with finish_first():  # readers see all of it or nothing, and so do those who look for its end
        return _publish(plan, launcher, progress, clock, receipts, audit, republish)


def _publish(
    plan: RunPlan,
    launcher: Launcher,
    progress: Progress,
    clock: Clock,
    receipts: list[ShardReceipt],
    audit: AuditReport,
    republish: bool,
) -> RunManifest:
    progress.step("publish")
    published = publish_run(plan, receipts, republish=republish)
    quarantine = publish_quarantine(plan, receipts)
    files.write_record(published_marker(plan.run_dir), publish_record(plan, time.time()))
    manifest = _write_manifest(
        plan,
        clock,
        progress,
        "published",
        receipts,
        audit=audit,
        published=published,
        quarantine=quarantine,
    )
    try:
        launcher.published(plan, progress)
    except NightshelfError as err:
        untold = "the run is published, but its table in another catalog was not told"
        if not err.retryable:  # the same command would meet it again
            err.what = f"{untold}: {err.what}"
            raise
        raise RunError(
            untold,
            got=str(err),
            where=f"run {plan.run_id}",
            do="Running the same command again tells it and changes nothing else.",
        ) from err
    return manifest


def all_receipts(
    plan: RunPlan, do: str = "Score it first: finished shards are kept."
) -> list[ShardReceipt]:
    """The receipts of every shard, whose files are there.

    Raises:
        RunError: shards are missing; `do` says what helps.
    """
    receipts = receipts_of(plan)
    if len(receipts) < plan.num_shards:
        raise RunError(
            "not every shard is scored",
            got=f"{len(receipts)} of {plan.num_shards}",
            where=f"run {plan.run_id}, {plan.run_dir}",
            do=do,
        )
    return receipts


def _launch_path(plan: RunPlan) -> str:
    return files.join(plan.run_dir, "launch.json")


def _audit_path(plan: RunPlan) -> str:
    return files.join(plan.run_dir, "audit.json")


def last_audit(plan: RunPlan) -> AuditReport:
    """The report that `audit_step` kept last."""
    return read_record(AuditReport, _audit_path(plan))


def _passed_audit(plan: RunPlan, receipts: list[ShardReceipt]) -> AuditReport:
    """The audit of exactly these receipts."""
    audit = last_audit(plan) if files.exists(_audit_path(plan)) else None
    if audit is None or audit.attempts != {r.shard: r.attempt for r in receipts}:
        raise RunError(
            "the run has not been audited as it is now", where=plan.run_dir, do="Audit it first."
        )
    if audit.refused:
        raise AuditRefusedError(
            "the audit refused to publish",
            got="; ".join(gate.words() for gate in audit.refused),
            where=f"run {plan.run_id}, {plan.run_dir}",
        )
    return audit


def receipts_of(plan: RunPlan) -> list[ShardReceipt]:
    """Receipts of the shards that are done, in shard order."""
    found = (load_receipt(plan, shard) for shard in shards_of(plan))
    return [receipt for receipt in found if receipt is not None]


def load_plan(run_dir: str) -> RunPlan:
    """The plan of a run folder.

    Raises:
        StorageError: there is none, or it cannot be read: it is damaged, or of another version.
    """
    path = plan_path(run_dir)
    if not files.exists(path):
        raise StorageError("no run is in this folder", got=quoted(run_dir))
    return read_record(RunPlan, path)


class Clock:
    """When a command started, and for how long it has run."""

    def __init__(self) -> None:
        self.started_at = dt.datetime.now(dt.UTC)
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started


def _write_manifest(
    plan: RunPlan,
    clock: Clock,
    progress: Progress,
    status: RunEnd,
    receipts: list[ShardReceipt],
    *,
    failed: dict[int, str] | None = None,
    audit: AuditReport | None = None,
    published: Published | None = None,
    quarantine: Published | None = None,
) -> RunManifest:
    manifest = RunManifest(
        plan=plan,
        status=status,
        counts=Counts.total(receipt.counts for receipt in receipts),
        shards=tuple(receipts),
        failed_shards=failed or {},
        audit=audit,
        published=published,
        published_quarantine=quarantine,
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


def load_manifest(plan: RunPlan) -> RunManifest:
    """The manifest of a run that has ended.

    Raises:
        RunError: it has not.
        StorageError: it cannot be read: it is damaged, or of another version.
    """
    path = manifest_path(plan.run_dir)
    if not files.exists(path):
        raise RunError("the run has not ended yet", where=plan.run_dir, do="Run it to its end.")
    return read_record(RunManifest, path)


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
    path = _launch_path(plan)
    return read_record(Launch, path).launcher if files.exists(path) else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

"""One run from plan to table, whatever launches its shards."""

from __future__ import annotations

import datetime as dt
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from pipelines import files
from pipelines.audit import audit_run
from pipelines.plan import plan_run
from pipelines.prepare import prepare_run, shards_of
from pipelines.publish import publish_run
from pipelines.publish.parquet import record_path
from pipelines.run_shard import load_receipt
from schemas.errors import AuditRefusedError, RunError, StorageError, quoted
from schemas.runs import (
    AuditReport,
    Counts,
    Published,
    RunManifest,
    RunPlan,
    Shard,
    ShardReceipt,
)
from schemas.settings import RunConfig

_PACKAGES = ("nightshelf", "torch", "transformers", "pyarrow", "polars", "numpy", "tokenizers")


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
    """Gets every shard a receipt, or says why not."""

    def launch(self, plan: RunPlan, shards: list[Shard], progress: Progress) -> dict[int, str]:
        """Run the shards; the reasons of those that failed, by shard."""


def manifest_path(run_dir: str) -> str:
    """Where a run's manifest is."""
    return files.join(run_dir, "manifest.json")


def plan_path(run_dir: str) -> str:
    """Where a run's plan is."""
    return files.join(run_dir, "plan.json")


def run_job(config: RunConfig, launcher: Launcher, progress: Progress) -> RunManifest:
    """Plan, prepare, score, audit and publish. Shards that have a receipt are not scored again.

    Raises:
        ShardFailedError, RunError: some shards failed; the same command continues the run.
        AuditRefusedError: a gate refused; nothing was published.
    """
    clock = _Clock()
    progress.step("plan")
    plan = plan_run(config)
    with _only_run_of(plan):
        return _run(plan, launcher, progress, clock)


@contextmanager
def _only_run_of(plan: RunPlan) -> Iterator[None]:
    """Hold the lock of the partition; it goes with the process that holds it, however that ends."""
    path = files.local_path(f"{record_path(plan)}.lock")
    assert path is not None, "the work folder is local: the plan checked it"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=0):
            yield
    except Timeout:
        raise RunError(
            "another run of this date and surface is at work",
            got=f"ds {plan.ds}, surface {plan.surface!r}",
            where=path,
            do="Wait for it to end, then run the same command again.",
        ) from None


def _run(plan: RunPlan, launcher: Launcher, progress: Progress, clock: _Clock) -> RunManifest:
    files.write_json(plan_path(plan.run_dir), plan.model_dump(mode="json"))
    progress.step("prepare")
    shards = prepare_run(plan)
    done = {shard.index: load_receipt(plan, shard) for shard in shards}
    todo = [shard for shard in shards if done[shard.index] is None]
    if len(todo) < len(shards):
        progress.note(f"{len(shards) - len(todo)} of {len(shards)} shards are done already")
    failed: dict[int, str] = {}
    if todo:
        progress.step("score")
        failed = launcher.launch(plan, todo, progress)
    receipts = receipts_of(plan)
    missing = {s.index for s in shards} - {r.shard for r in receipts}
    for index in missing - failed.keys():
        failed[index] = "the shard left no receipt"
    if failed:
        _write_manifest(plan, clock, "failed", receipts, failed=failed)
        first = min(failed)
        raise RunError(
            f"{len(failed)} of {len(shards)} shards failed",
            got=f"shard-{first:05d}: {failed[first]}",
            where=f"run {plan.run_id}",
            do="Nothing was published. Run the same command again: finished shards are kept.",
        )
    progress.step("audit")
    audit = audit_run(plan, receipts)
    if audit.refused:
        _write_manifest(plan, clock, "refused", receipts, audit=audit)
        reasons = "; ".join(
            f"{g.gate} is {g.value:g}, allowed {g.allowed} ({g.detail})" for g in audit.refused
        )
        raise AuditRefusedError(
            "the audit refused to publish",
            got=reasons,
            where=f"run {plan.run_id}, {plan.run_dir}",
            do="What was published before is unchanged.",
        )
    progress.step("publish")
    published = publish_run(plan, receipts)
    return _write_manifest(plan, clock, "published", receipts, audit=audit, published=published)


def receipts_of(plan: RunPlan) -> list[ShardReceipt]:
    """Receipts of the shards that are done, in shard order."""
    found = (load_receipt(plan, shard) for shard in shards_of(plan))
    return [receipt for receipt in found if receipt is not None]


def load_plan(run_dir: str) -> RunPlan:
    """The plan of a run folder; `RunError` when there is none."""
    path = plan_path(run_dir)
    if not files.exists(path):
        raise StorageError("no run is in this folder", got=quoted(run_dir))
    return RunPlan.model_validate(files.read_json(path))


class _Clock:
    def __init__(self) -> None:
        self.started_at = dt.datetime.now(dt.UTC)
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started


def _write_manifest(
    plan: RunPlan,
    clock: _Clock,
    status: str,
    receipts: list[ShardReceipt],
    *,
    failed: dict[int, str] | None = None,
    audit: AuditReport | None = None,
    published: Published | None = None,
) -> RunManifest:
    manifest = RunManifest(
        plan=plan,
        status=status,  # type: ignore[arg-type]
        counts=Counts.total(receipt.counts for receipt in receipts),
        shards=tuple(receipts),
        failed_shards=failed or {},
        audit=audit,
        published=published,
        started_at=clock.started_at.isoformat(timespec="seconds"),
        finished_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        seconds=clock.seconds,
        versions=_versions(),
    )
    files.write_json(manifest_path(plan.run_dir), manifest.model_dump(mode="json"))
    return manifest


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

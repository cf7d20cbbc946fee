"""The records in a run's folder: its plan, its receipts, its audit, its manifest."""

from __future__ import annotations

from pipelines.inputs.prepared import shards_of
from pipelines.shards.run_shard import load_receipt
from pipelines.storage import files
from pipelines.storage.records import read_record
from schemas.errors import RunError, StorageError, quoted
from schemas.gates import AuditReport
from schemas.runs import RunManifest, RunPlan, ShardReceipt


def manifest_path(run_dir: str) -> str:
    """Where a run's manifest is."""
    return files.join(run_dir, "manifest.json")


def plan_path(run_dir: str) -> str:
    """Where a run's plan is."""
    return files.join(run_dir, "plan.json")


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


def launch_path(plan: RunPlan) -> str:
    """Where a run says who launches its shards."""
    return files.join(plan.run_dir, "launch.json")


def audit_path(plan: RunPlan) -> str:
    """Where a run keeps its audit."""
    return files.join(plan.run_dir, "audit.json")


def last_audit(plan: RunPlan) -> AuditReport:
    """The report that `audit_step` kept last."""
    return read_record(AuditReport, audit_path(plan))


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

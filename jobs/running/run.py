"""One run from plan to table, whatever launches its shards."""

from __future__ import annotations

import time

from jobs.running.ending import finish_first
from jobs.running.launcher import Launcher, Progress
from jobs.running.manifest import Clock, Outcome, write_manifest
from jobs.running.run_folder import (
    all_receipts,
    audit_path,
    last_audit,
    launch_path,
    plan_path,
    receipts_of,
)
from jobs.running.run_lock import only_run_of
from pipelines.auditing.audit import audit_run, staged_files
from pipelines.catalog.build import is_saved
from pipelines.catalog.items import catalog_dir
from pipelines.inputs.prepared import forget_prepared, is_intact, is_prepared, shards_of
from pipelines.inputs.unchanged import check_inputs, check_model
from pipelines.planning.plan import plan_run
from pipelines.publish import check_not_withdrawn, publish_quarantine, publish_run
from pipelines.shards.profile import publish_record, published_marker
from pipelines.shards.run_shard import load_receipt
from pipelines.storage import files
from schemas.errors import AuditRefusedError, DamagedFileError, NightshelfError, RunError
from schemas.gates import AuditReport
from schemas.markers import Launch
from schemas.runs import RunManifest, RunPlan, Shard, ShardReceipt
from schemas.settings import RunConfig


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
        files.write_record(launch_path(plan), Launch(launcher=launcher.name).model_dump())
        failed = _launch_and_repair(plan, launcher, todo, progress)
    receipts = receipts_of(plan)
    missing = {s.index for s in shards} - {r.shard for r in receipts}
    for index in missing - failed.keys():
        failed[index] = "the shard left no receipt"
    if not failed:
        return
    write_manifest(
        plan, clock, progress, Outcome(status="failed", receipts=receipts, failed=failed)
    )
    first = min(failed)
    raise RunError(
        f"{len(failed)} of {len(shards)} shards failed",
        got=f"shard-{first:05d}: {failed[first]}",
        where=f"run {plan.run_id}",
        do="Nothing was published. Run the same command again: finished shards are kept.",
    )


def _launch_and_repair(
    plan: RunPlan, launcher: Launcher, todo: list[Shard], progress: Progress
) -> dict[int, str]:
    """Launch shards. Where what they read is not what prepare wrote (a disk that lost bits, a crash
    that cut files short), it is written again and its shards are launched once more.
    """
    damage: DamagedFileError | None = None
    try:
        failed = launcher.launch(plan, todo, progress)
    except DamagedFileError as err:
        damage = err
        failed = {s.index: str(err) for s in todo if load_receipt(plan, s) is None}
    items = "catalog" not in plan.inputs or not failed or is_saved(catalog_dir(plan))
    broken = [s for s in todo if s.index in failed and not (items and is_intact(plan, s))]
    if not broken:
        if damage is not None:
            raise damage
        return failed
    progress.note(f"what {len(broken)} shards read was damaged: it is prepared again")
    forget_prepared(plan)
    launcher.prepare(plan, progress)
    again = {s.index for s in broken}
    kept = {index: why for index, why in failed.items() if index not in again}
    return kept | launcher.launch(plan, broken, progress)


def audit_step(plan: RunPlan, progress: Progress, clock: Clock) -> AuditReport:
    """Apply the gates to a run whose shards are done, and keep the report.

    Raises:
        RunError: shards are missing.
        AuditRefusedError: a gate refused.
    """
    progress.step("audit")
    receipts = all_receipts(plan)
    audit = audit_run(plan, receipts)
    files.write_record(audit_path(plan), audit.model_dump(mode="json"))
    if audit.refused:
        write_manifest(
            plan, clock, progress, Outcome(status="refused", receipts=receipts, audit=audit)
        )
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
    outcome = Outcome(
        status="published",
        receipts=receipts,
        audit=audit,
        published=published,
        quarantine=quarantine,
    )
    manifest = write_manifest(plan, clock, progress, outcome)
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


def _passed_audit(plan: RunPlan, receipts: list[ShardReceipt]) -> AuditReport:
    """The audit of exactly these receipts."""
    audit = last_audit(plan) if files.exists(audit_path(plan)) else None
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

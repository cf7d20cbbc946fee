"""Audit a finished run before anything is published. A gate that does not pass refuses the run, or
warns where `audit.warn` names it.

The staged files are read back from disk, so that what is checked is what would be published.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow.compute as pc
from numpy.typing import NDArray

from engine.tasks import tasks_of
from pipelines.auditing.row_gates import RowGates
from pipelines.publish.last_published import last_published
from pipelines.shards.profile import ProfileBuilder, RunProfile, overlap, score_drift
from pipelines.sources.frames import read_frame
from pipelines.storage import files
from schemas.counts import Counts
from schemas.gates import AuditReport, GateResult, count, threshold
from schemas.runs import RunPlan, ShardReceipt

_FEW = 0.05  # share of users whose lists may be shorter than `rows_p5` says


def audit_run(plan: RunPlan, receipts: list[ShardReceipt]) -> AuditReport:
    """Apply every gate to the staged rows of a run that has all its receipts."""
    counts = Counts.total(receipt.counts for receipt in receipts)
    settings = plan.config.audit
    gates_on_rows = _list_gates if plan.config.task.gives_lists else _embedding_gates
    gates = [
        _conservation(plan, counts, receipts),
        staged_files(plan, receipts),
        _not_empty(plan, counts),
        *gates_on_rows(plan, receipts, counts),
        threshold(
            "coverage",
            (counts.users_recommended + counts.users_embedded) / max(counts.users_in, 1),
            "share of users with a result",
            least=settings.min_coverage or None,
        ),
        threshold(
            "quarantine_rate",
            counts.users_quarantined / max(counts.users_in, 1),
            "share of users quarantined",
            most=_limit(settings.max_quarantine_rate),
        ),
        *_history_gates(plan, counts),
    ]
    warn = set(settings.warn)
    acted = (
        gate.model_copy(update={"action": "warn" if gate.gate in warn else "refuse"})
        for gate in gates
    )
    attempts = {receipt.shard: receipt.attempt for receipt in receipts}
    return AuditReport(run_id=plan.run_id, attempts=attempts, gates=tuple(acted))


def _limit(most: float) -> float | None:
    """A largest share that a share can go above, else None."""
    return most if most < 1 else None


def _history_gates(plan: RunPlan, counts: Counts) -> list[GateResult]:
    """History whose items the catalog does not have is no history: such a night gives every user
    the same list. Refused *from* the limit on, unless nothing is unknown.
    """
    if not plan.config.reads_history:
        return []
    most = _limit(plan.config.audit.max_unknown_history)
    items = counts.history_items
    share = counts.unknown_history_items / items if items else None
    return [
        GateResult(
            gate="unknown_history",
            passed=most is None or not share or share < most,
            value=share,
            allowed="any" if most is None else f"< {most:g}" if most else "0",
            detail=f"share of the {items:,} history items that the catalog does not have",
        )
    ]


def _conservation(plan: RunPlan, counts: Counts, receipts: list[ShardReceipt]) -> GateResult:
    """Every user of the input is recommended, quarantined or without anything eligible."""
    problems = counts.imbalances()
    listed = plan.inputs["users"].rows
    if counts.users_in != listed:
        problems.append(f"users in shards {counts.users_in} != rows of the users table {listed}")
    if sorted(receipt.shard for receipt in receipts) != list(range(plan.num_shards)):
        problems.append("the receipts are not one per shard")
    return count("conservation", len(problems), "; ".join(problems))


def _not_empty(plan: RunPlan, counts: Counts) -> GateResult:
    """A run of users that comes to no row would empty its partition."""
    allowed = plan.config.audit.allow_empty
    return threshold(
        "not_empty",
        float(counts.rows_staged),
        "rows; audit.allow_empty is set" if allowed else "rows; none needs audit.allow_empty",
        least=None if allowed else 1.0,
    )


def staged_files(plan: RunPlan, receipts: list[ShardReceipt]) -> GateResult:
    """Staged files are the ones the receipts describe, bit for bit."""
    bad = [
        file.path
        for receipt in receipts
        for file in receipt.files.values()
        if files.hash_file(files.join(plan.run_dir, file.path)) != file.xxh3
    ]
    return count("staged_files", len(bad), ", ".join(bad[:3]))


def _list_gates(plan: RunPlan, receipts: list[ShardReceipt], counts: Counts) -> list[GateResult]:
    """Gates on the recommendations; every staged file is read once."""
    rows, builder = RowGates(plan), ProfileBuilder(plan, counts)
    lengths = np.zeros(plan.config.task.k + 1, dtype=np.int64)
    for receipt in receipts:
        frame = read_frame(files.join(plan.run_dir, receipt.result.path))
        rows.add(receipt, frame)
        builder.add(frame)
        outcomes = files.join(plan.run_dir, receipt.files["outcomes"].path)
        returned = read_frame(outcomes, ["returned"])["returned"].to_numpy()
        lengths += np.bincount(returned, minlength=len(lengths))
    sample = builder.save(plan)
    in_history = None if rows.in_history is None else rows.in_history / max(counts.rows_staged, 1)
    bad = [count(name, found, detail) for name, (found, detail) in rows.counts.items()]
    return [
        *bad,
        *_length_gates(plan, lengths),
        *(gate for task in tasks_of(plan.config) for gate in task.gates(counts, receipts)),
        *_sameness_gates(plan, sample, in_history),
        *_change_gates(plan, builder.profile, sample),
    ]


def _length_gates(plan: RunPlan, lengths: NDArray[np.int64]) -> list[GateResult]:
    """`lengths[n]`: users with n items; those without any are the coverage's concern."""
    settings = plan.config.audit
    users = lengths[1:].cumsum()
    shortest = p5 = 0.0
    if users[-1]:
        shortest = float(np.searchsorted(users, 1) + 1)
        p5 = float(np.searchsorted(users, _FEW * users[-1], side="right") + 1)
    at_p5 = "items of the list at the 5th percentile"
    return [
        threshold("rows_min", shortest, "items of the shortest list", least=settings.min_rows),
        threshold("rows_p5", p5, at_p5, least=settings.min_rows_p5),
    ]


def _sameness_gates(
    plan: RunPlan, sample: pl.DataFrame, in_history: float | None
) -> list[GateResult]:
    """Lists that are everybody's, and rows that tell a user nothing new."""
    settings = plan.config.audit
    lists = sample.group_by("user_id").agg(
        pl.struct("rank", "item_id").hash(seed=0).sort().implode().hash(seed=0).first().alias("of")
    )
    distinct = lists["of"].n_unique() / len(lists) if len(lists) else None
    gates = [
        threshold(
            "distinct_lists",
            distinct,
            f"share of distinct lists, over {len(lists):,} users",
            least=settings.min_distinct_lists or None,
        )
    ]
    if plan.config.reads_history:
        detail = "share of rows whose item is in the user's own history"
        most = settings.max_history_rows
        gates.append(threshold("history_rows", in_history, detail, most=most))
    return gates


def _change_gates(plan: RunPlan, profile: RunProfile, sample: pl.DataFrame) -> list[GateResult]:
    """What changed since the surface was last published."""
    settings = plan.config.audit
    before = last_published(plan)
    drift = common = change = None
    against = "nothing was published before"
    over = ""
    if before is not None:
        then, rows = before
        against = f"against run {then.run_id}"
        drift = score_drift(rows["score"], sample["score"])
        if [rows.schema[n] == sample.schema[n] for n in ("user_id", "item_id")] == [True, True]:
            common, users = overlap(rows, sample)
            over = f", over {users} users"
        change = abs(profile.rows / then.rows - 1) if then.rows else None
    gates = [
        threshold(
            "score_drift", drift, f"PSI of the scores, {against}", most=settings.max_score_drift
        ),
        threshold(
            "overlap", common, f"mean overlap of lists, {against}{over}", least=settings.min_overlap
        ),
        threshold(
            "row_change", change, f"change of the number of rows, {against}",
            most=settings.max_row_change,
        ),
    ]  # fmt: skip
    other = before[0].run_id if before is not None else None
    return [gate.model_copy(update={"against": other}) for gate in gates]


def _embedding_gates(
    plan: RunPlan, receipts: list[ShardReceipt], _counts: Counts
) -> list[GateResult]:
    """Checks on embeddings, shard by shard."""
    details = {
        "duplicates": "a user stands more than once",
        "vectors": "a vector holds NaN or Inf",
        "widths": "vectors have another width than those of the first shard",
        "rows": "rows differ from the receipts",
    }
    bad = dict.fromkeys(details, 0)
    width: int | None = None
    for receipt in receipts:
        table = files.read_parquet(files.join(plan.run_dir, receipt.result.path))
        column = table.column("embedding").combine_chunks()
        width = width or column.type.list_size
        bad["rows"] += abs(len(table) - receipt.counts.rows_staged)
        bad["duplicates"] += len(table) - pc.count_distinct(table.column("user_id")).as_py()
        bad["vectors"] += int((~np.isfinite(column.flatten().to_numpy())).sum())
        bad["widths"] += int(column.type.list_size != width)
    return [count(name, found, details[name]) for name, found in bad.items()]

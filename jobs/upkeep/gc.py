"""Remove what runs leave in the work folder and nobody needs any more.

What is derived from a run's inputs (shards, catalog, attempts) goes once the run is idle for some
days, also of runs that are published: a run that is started again makes it anew. Staged rows are
what a run is published and rolled back from, and looked at: they stay for the runs that readers see
now and for the latest ones before them, as the tables remember them. Plans, manifests, receipts'
counts and profiles stay for all: they are small. Published tables are never touched.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from jobs.running.run_folder import load_plan
from jobs.running.run_lock import only_run_of
from jobs.upkeep.run_states import RunStatus, all_runs
from pipelines.publish import open_table
from pipelines.shards.profile import published_marker
from pipelines.storage import files
from pipelines.storage.records import read_record
from schemas.errors import RunError
from schemas.markers import Marker

_DERIVED = ("shards", "spill", "catalog", "attempts")
_HEAVY = ("staged", *_DERIVED)
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What was removed of one run, or would be."""

    run_id: str
    status: str
    bytes: int


def clean_up(work_dir: str, *, keep: int, older_than_days: float, dry_run: bool) -> list[Removed]:
    """Remove derived files of idle runs, and staged files of those that nobody goes back to.

    Args:
        keep: published runs of each partition, the present one besides, that keep staged files.
        older_than_days: runs that wrote anything since are left alone.
        dry_run: only say what would go.
    """
    runs = all_runs(work_dir)
    kept = _kept(runs, keep)
    removed: list[Removed] = []
    for run in runs:
        if run.status == "unreadable":
            continue
        names = _DERIVED if run.run_id in kept else _HEAVY
        if _days_idle(run.run_dir) < older_than_days:
            continue
        sizes = {name: _bytes(files.join(run.run_dir, name)) for name in names}
        heavy = [files.join(run.run_dir, name) for name, size in sizes.items() if size is not None]
        if not heavy or (not dry_run and not _remove(run.run_dir, heavy, older_than_days)):
            continue
        size = sum(size or 0 for size in sizes.values())
        removed.append(Removed(run_id=run.run_id, status=run.status, bytes=size))
    gone = {one.run_id for one in removed}
    left = [run for run in runs if run.run_id not in gone]
    if any(run.status == "unreadable" for run in runs):  # its plan may name any copy
        return removed
    return [*removed, *_copies(work_dir, left, older_than_days, dry_run)]


def _copies(
    work_dir: str, runs: list[RunStatus], older_than_days: float, dry_run: bool
) -> list[Removed]:
    """Remove copies of Spark's tables that are old, and not of a run that may still read them: one
    that keeps its shards, or that wrote anything lately.
    """
    tables = files.join(work_dir, "tables")
    used = [
        load_plan(run.run_dir)
        for run in runs
        if files.exists(files.join(run.run_dir, "shards"))
        or _days_idle(run.run_dir) < older_than_days
    ]
    inputs = {
        file.path.rpartition("/")[0].rpartition("/")[2]
        for plan in used
        for table in plan.inputs.values()
        for file in table.files
    }
    removed = []
    for name in files.list_names(tables):
        folder = files.join(tables, name)
        if name in inputs or _days_idle(folder) < older_than_days:
            continue
        size = _bytes(folder) or 0
        if not dry_run:
            files.remove_folder(folder)
        removed.append(Removed(run_id=f"tables/{name}", status="copy", bytes=size))
    return removed


def _kept(runs: list[RunStatus], keep: int) -> set[str]:
    """Runs that partitions hold, also such that serve another date, and the latest `keep` before
    each, as far as the table remembers them; behind that by their markers.
    """
    kept = {run.run_id for run in runs if run.serves}
    partitions: dict[tuple[str, str, str], list[RunStatus]] = {}
    for run in runs:
        if run.status != "unreadable":
            partitions.setdefault((run.table, run.ds, run.surface), []).append(run)
    for mine in partitions.values():
        plan = load_plan(mine[0].run_dir)
        table = open_table(plan.config, ds=plan.ds)
        current = table.current()
        order = [current.run_id] if current is not None else []
        order += [entry.run_id for entry in table.history()]
        published = [run for run in mine if _published_at(run)]
        order += [run.run_id for run in sorted(published, key=_published_at, reverse=True)]
        kept |= set(list(dict.fromkeys(order))[: keep + 1])
    return kept


def _published_at(run: RunStatus) -> float:
    """When the run was published first, seconds; 0 where it never was."""
    marker = published_marker(run.run_dir)
    return read_record(Marker, marker).published_at if files.exists(marker) else 0.0


def _days_idle(run_dir: str) -> float:
    """Days since anything was written in a run's folder."""
    return (time.time() - files.describe_folder(run_dir)[1]) / _DAY_S


def _bytes(folder: str) -> int | None:
    """Bytes in a folder; None where there is none."""
    return files.describe_folder(folder)[0] if files.exists(folder) else None


def _remove(run_dir: str, folders: list[str], older_than_days: float) -> bool:
    """Under the partition's lock, so that no run is at work there; False when one is, or was since
    the folder was looked at: it may be what readers see now.
    """
    try:
        with only_run_of(load_plan(run_dir)):
            if _days_idle(run_dir) < older_than_days:
                return False
            for folder in folders:
                files.remove_folder(folder)
    except RunError:
        return False
    return True

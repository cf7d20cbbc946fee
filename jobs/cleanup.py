"""Remove what runs leave in the work folder and nobody needs any more.

A run's shards and staged files are what it resumes from and is published, rolled back and looked at
from. They are kept for the run that a partition holds now, for the latest ones before it (to roll
back to), and for any run that was at work lately. Plans, manifests, receipts' counts and profiles
stay for all of them: they are small. Published tables are never touched.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from jobs.inspect import RunStatus, all_runs
from jobs.run import load_plan, lock_path
from pipelines import files
from pipelines.profile import published_marker

_HEAVY = ("staged", "shards", "spill", "catalog")
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What was removed of one run, or would be."""

    run_id: str
    status: str
    bytes: int


def clean_up(work_dir: str, *, keep: int, older_than_days: float, dry_run: bool) -> list[Removed]:
    """Remove shards and staged files of runs that are done with.

    Args:
        keep: published runs of each partition, the present one besides, that keep theirs.
        older_than_days: runs that wrote anything since are left alone.
        dry_run: only say what would go.
    """
    runs = all_runs(work_dir)
    kept = _kept(runs, keep)
    removed = []
    for run in runs:
        heavy = [Path(run.run_dir) / name for name in _HEAVY]
        present = [folder for folder in heavy if folder.is_dir()]
        if run.status == "unreadable" or not present or run.run_dir in kept:
            continue
        if _days_idle(run.run_dir) < older_than_days:
            continue
        size = sum(_size(folder) for folder in present)
        if not dry_run and not _remove(run.run_dir, present):
            continue
        removed.append(Removed(run_id=run.run_id, status=run.status, bytes=size))
    return removed


def _kept(runs: list[RunStatus], keep: int) -> set[str]:
    """Folders of the runs that partitions hold, and of the latest `keep` before each."""
    partitions: dict[tuple[str, str, str], list[tuple[bool, float, str]]] = {}
    for run in runs:
        marker = published_marker(run.run_dir)
        if files.exists(marker):
            at = float(files.read_json(marker)["published_at"])
            entry = (run.status == "published", at, run.run_dir)
            partitions.setdefault((run.table, run.ds, run.surface), []).append(entry)
    return {
        folder
        for entries in partitions.values()
        for *_, folder in sorted(entries, reverse=True)[: keep + 1]
    }


def _days_idle(run_dir: str) -> float:
    """Days since anything was written in a run's folder."""
    times = [0.0]
    for path in Path(run_dir).rglob("*"):
        with suppress(FileNotFoundError):  # a run at work renames its temporary files
            times.append(path.stat().st_mtime)
    return (time.time() - max(times)) / _DAY_S


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _remove(run_dir: str, folders: list[Path]) -> bool:
    """Under the partition's lock, so that no run is at work there; False when one is."""
    try:
        with FileLock(lock_path(load_plan(run_dir)), timeout=0):
            for folder in folders:  # first what says that a folder is whole
                (folder / "_done").unlink(missing_ok=True)
                shutil.rmtree(folder)
    except Timeout:
        return False
    return True

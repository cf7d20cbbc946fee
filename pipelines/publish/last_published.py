"""The run that an audit compares with: what readers see, as the table says it."""

from __future__ import annotations

import polars as pl

from pipelines.publish import open_table
from pipelines.shards.profile import RunProfile, load_profile, load_sample, task_kind
from pipelines.storage import files
from pipelines.storage.records import read_record
from schemas.errors import NightshelfError
from schemas.runs import RunPlan


def last_published(plan: RunPlan) -> tuple[RunProfile, pl.DataFrame] | None:
    """The latest other run of the surface that readers see for this date or one before, of those
    that this work folder knows and whose scores can be compared.

    A run that was rolled back is none of them: the table no longer serves it.

    Raises:
        StorageError: the table cannot be read.
    """
    for ds, run_id in open_table(plan.config, ds=plan.ds).dates():
        run_dir = files.join(plan.config.run.work_dir, run_id)
        if ds > plan.ds or run_id == plan.run_id or not _comparable(plan, run_dir):
            continue
        profile, sample = load_profile(run_dir), load_sample(run_dir)
        if profile is not None and sample is not None:
            return profile, sample
    return None


def _comparable(plan: RunPlan, run_dir: str) -> bool:
    """Whether the other run's scores are of the same kind."""
    path = files.join(run_dir, "plan.json")
    if not files.exists(path):
        return False
    try:
        other = read_record(RunPlan, path)
    except NightshelfError:  # of another version, or damaged: nothing to compare with
        return False
    return task_kind(other.config) == task_kind(plan.config)

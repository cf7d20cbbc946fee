"""Publish an older run again: from the table where its rows are left, else from its staged files.

The staged files are those of the run's folder, checked against their receipts: what comes back is
what the audit let through then.
"""

from __future__ import annotations

from pipelines import files
from pipelines.prepared import shards_of
from pipelines.publish import open_table
from pipelines.publish.rows import RunRows
from pipelines.records import read_record
from pipelines.run_shard import load_receipt
from schemas.errors import ConfigError, ConflictError, StorageError, quoted
from schemas.runs import Published, RunManifest, RunPlan
from schemas.settings import RunConfig


def rollback(config: RunConfig, run_id: str | None = None) -> Published:
    """Make an older run of the configuration's date and surface the one that readers see.

    Args:
        config: whose output is changed.
        run_id: which run; the one before the current one when None.

    Raises:
        ConfigError: there is no such run, or it never passed its audit.
        ConflictError: another publisher changed the partition meanwhile.
        StorageError: its rows are neither in the table nor in its run folder.
    """
    table = open_table(config)
    history = table.history()
    current = table.current()
    wanted = run_id or _previous(config, history, current)
    now = None if current is None else current.run_id
    if current is not None and now == wanted:
        return current
    older = next((entry for entry in history if entry.run_id == wanted), None)
    run_dir = files.join(config.run.work_dir, wanted)
    if older is None and not _was_published(config, run_dir):
        raise ConfigError(
            "the run was never published here",
            expected=f"a run of ds {config.ds}, surface {config.surface!r}: {_names(history)}",
            got=quoted(wanted),
            where=config.output.path,
        )
    if older is not None:
        try:
            return table.restore(older, withdraw=now)
        except ConflictError:
            raise
        except StorageError:  # the table let them go; the run's folder may have them
            pass
    return table.replace(_staged(config, run_dir), withdraw=now)


def _previous(config: RunConfig, history: list[Published], current: Published | None) -> str:
    now = None if current is None else current.run_id
    for entry in history:
        if entry.run_id != now:
            return entry.run_id
    raise ConfigError(
        "there is no earlier run to go back to",
        got=f"ds {config.ds}, surface {config.surface!r}, published: {_names(history)}",
        where=config.output.path,
    )


def _names(history: list[Published]) -> str:
    return ", ".join(dict.fromkeys(entry.run_id for entry in history)) or "none"


def _was_published(config: RunConfig, run_dir: str) -> bool:
    """Whether the run's own manifest says so, where the table's memory does not reach."""
    path = files.join(run_dir, "manifest.json")
    if not files.exists(path):
        return False
    manifest = read_record(RunManifest, path)
    same = (manifest.plan.ds, manifest.plan.surface) == (config.ds, config.surface)
    return same and manifest.status == "published"


def _staged(config: RunConfig, run_dir: str) -> RunRows:
    """The rows of a run folder, in the layout that the table has now."""
    path = files.join(run_dir, "plan.json")
    if not files.exists(path):
        raise _gone(run_dir, "the run's folder is gone")
    found = read_record(RunPlan, path)
    settings = found.config.model_copy(update={"output": config.output})
    plan = found.model_copy(update={"config": settings, "run_dir": run_dir})
    receipts = [receipt for s in shards_of(plan) if (receipt := load_receipt(plan, s)) is not None]
    if len(receipts) < plan.num_shards:
        lost = plan.num_shards - len(receipts)
        raise _gone(run_dir, f"{lost} of {plan.num_shards} shards have no staged files any more")
    for receipt in receipts:
        staged = files.join(run_dir, receipt.result.path)
        if files.hash_file(staged) != receipt.result.xxh3:
            raise _gone(run_dir, f"{receipt.result.path} is not what its receipt says")
    return RunRows(plan=plan, receipts=tuple(receipts))


def _gone(run_dir: str, why: str) -> StorageError:
    return StorageError(
        "the run cannot be published again",
        got=why,
        where=run_dir,
        do="What is published now is unchanged.",
    )

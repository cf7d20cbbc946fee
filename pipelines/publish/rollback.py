"""Take back what is published: an older run again, another date's rows, or nothing.

An older run comes from the table where its rows are left, else from its staged files.

The staged files are those of the run's folder, checked against their receipts: what comes back is
what the audit let through then.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from pipelines.inputs.prepared import shards_of
from pipelines.publish import open_table
from pipelines.publish.lake_files import check_rows
from pipelines.publish.rows import RunRows
from pipelines.publish.table import PublishedTable
from pipelines.shards.profile import published_marker, table_key
from pipelines.shards.run_shard import load_receipt
from pipelines.storage import files
from pipelines.storage.records import read_record
from schemas.errors import ConfigError, ConflictError, StorageError, quoted
from schemas.markers import Marker
from schemas.runs import Published, RunManifest, RunPlan
from schemas.settings import RunConfig


def rollback(config: RunConfig, run_id: str | None = None) -> Published:
    """Make an older run of the configuration's date and surface the one that readers see. The run
    that they saw is withdrawn: only a person publishes it again.

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
    now = None if current is None else current.run_id
    wanted = run_id or _previous(config, table, history, now)
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


def serve_from(config: RunConfig, ds: str) -> Published:
    """Make the configuration's date serve the rows that are published for another date. The run
    that its readers saw is withdrawn.

    Raises:
        ConfigError: nothing is published for that date.
        ConflictError: another publisher changed the partition meanwhile.
        StorageError: rows could not be read, or are not what was published.
    """
    source = open_table(config, ds=ds)
    found = source.current()
    if found is None or ds == config.ds:
        raise ConfigError(
            "there are no rows to serve from",
            expected="another date of the surface that something is published for",
            got=f"ds {ds}",
            where=config.output.path,
            field="--serve-from",
        )
    table = open_table(config)
    current = table.current()
    now = current.run_id if current is not None and current.run_id != found.run_id else None
    return table.replace(CopiedRows(source, found, config.output.layout), withdraw=now)


def unpublish(config: RunConfig) -> Published | None:
    """Make the configuration's date and surface one that nothing is published for. The run that
    readers saw is withdrawn.

    Returns:
        What readers saw; None when there was nothing.

    Raises:
        ConflictError: another publisher changed the partition meanwhile.
        StorageError: the table could not be changed.
    """
    table = open_table(config)
    current = table.current()
    if current is not None:
        table.clear(withdraw=current.run_id)
    return current


class CopiedRows:
    """What another date serves, as the rows of this one; every file is held to its hash."""

    def __init__(self, source: PublishedTable, found: Published, layout: str) -> None:
        self._source, self._found, self.layout = source, found, layout

    @property
    def run_id(self) -> str:
        """See `Rows`."""
        return self._found.run_id

    @property
    def parts(self) -> int:
        """See `Rows`."""
        return max(1, len(self._found.files))

    def shards(self) -> Iterator[tuple[int, pa.Table]]:
        """See `Rows`."""
        number = 0
        for part in self._source.parts():
            check_rows(part, self.run_id, self._found.partition)
            yield number, _without_partition(part)
            number += 1
        if number == 0:
            yield 0, _without_partition(self._source.read())

    def schema(self) -> pa.Schema:
        """See `Rows`."""
        return next(self.shards())[1].schema


def _without_partition(rows: pa.Table) -> pa.Table:
    return rows.drop_columns([name for name in ("ds", "surface") if name in rows.column_names])


def _previous(
    config: RunConfig, table: PublishedTable, history: list[Published], now: str | None
) -> str:
    """The run before: the table knows, or where it has forgotten, the run folders."""
    for entry in history:
        if entry.run_id != now and (now is not None or not table.is_withdrawn(entry.run_id)):
            return entry.run_id
    for run_id in _of_run_folders(config):
        if run_id != now and not table.is_withdrawn(run_id):
            return run_id
    raise ConfigError(
        "there is no earlier run to go back to",
        got=f"ds {config.ds}, surface {config.surface!r}, published: {_names(history)}",
        where=config.output.path,
        do="Name one with --run, serve another date's rows with --serve-from, or take these back "
        "with nightshelf unpublish.",
    )


def _of_run_folders(config: RunConfig) -> list[str]:
    """Runs of the work folder that were published here once, the latest first."""
    found = []
    for name in files.list_names(config.run.work_dir):
        marker = published_marker(files.join(config.run.work_dir, name))
        if not name.startswith(f"{config.ds}-") or not files.exists(marker):
            continue
        record = read_record(Marker, marker)
        if (record.ds, record.surface, record.table) == (
            config.ds,
            config.surface,
            table_key(config),
        ):
            found.append((record.published_at, name))
    return [name for _, name in sorted(found, reverse=True)]


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

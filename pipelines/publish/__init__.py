"""Publish: the one step that makes a run's rows visible. One module per table format."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import get_args

import pyarrow as pa

from engine.backends.registry import spec_of
from pipelines.publish.names import NULL_PARTITION
from pipelines.publish.parquet import ParquetTable, read_current
from pipelines.publish.rows import RunRows, published_schema
from pipelines.publish.table import PublishedTable
from pipelines.storage import files
from schemas.errors import ConfigError, WithdrawnError, quoted
from schemas.runs import Published, RunPlan, ShardReceipt
from schemas.settings import RunConfig
from schemas.tables import QUARANTINE, IdType

__all__ = [
    "check_not_withdrawn",
    "check_output",
    "open_table",
    "publish_quarantine",
    "publish_run",
    "read_current",
]


def publish_run(
    plan: RunPlan, receipts: list[ShardReceipt], *, republish: bool = False
) -> Published:
    """Publish a run that passed its audit, in the configured format.

    Publishing a run twice, or a new run over an old one, leaves exactly one set of rows; a run
    without rows leaves an empty partition.

    Args:
        republish: also a run that was taken back.

    Raises:
        WithdrawnError: it was taken back by `rollback` or `unpublish`.
        ConfigError: the table cannot hold its rows.
        ConflictError: another publisher changed the partition meanwhile.
        StorageError: the table could not be read or written; publishing again completes it.
    """
    if not republish:
        check_not_withdrawn(plan)
    table = open_table(plan.config, ds=plan.ds)
    return table.replace(RunRows(plan=plan, receipts=tuple(receipts)))


def check_not_withdrawn(plan: RunPlan) -> None:
    """Raise `WithdrawnError` when the run was taken back by `rollback` or `unpublish`: a scheduler
    that tries it again must not make its rows visible.
    """
    if open_table(plan.config, ds=plan.ds).is_withdrawn(plan.run_id):
        raise WithdrawnError(
            "the run was taken back, and is not published again by itself",
            got=f"run {plan.run_id}",
            where=plan.config.output.path,
            do="What is published stays. To publish it all the same: nightshelf run --republish.",
        )


def publish_quarantine(plan: RunPlan, receipts: list[ShardReceipt]) -> Published | None:
    """Publish the rows that a run set aside to `output.quarantine`; None where there is none.

    Raises: as `publish_run`.
    """
    if plan.config.output.quarantine is None:
        return None
    rows = RunRows(plan=plan, receipts=tuple(receipts), quarantine=True)
    return open_table(plan.config, ds=plan.ds, quarantine=True).replace(rows)


def open_table(
    config: RunConfig, *, ds: str | None = None, quarantine: bool = False
) -> PublishedTable:
    """The partition of a configuration's date and surface, of the table or of its quarantine.

    Raises:
        ConfigError: no date, or the format's package is not installed.
    """
    ds = ds or config.ds
    if ds is None:
        raise ConfigError("no partition date", expected="--ds YYYY-MM-DD, or ds in the file")
    output = config.output
    if quarantine:
        assert output.quarantine is not None, "asked for only where it is configured"
        name = "table" if output.format == "iceberg" else "path"
        output = output.model_copy(update={name: output.quarantine})
    try:
        if output.format == "iceberg":
            from pipelines.publish.iceberg import IcebergTable

            return IcebergTable(output, ds, config.surface)
        if output.format == "delta":
            from pipelines.publish.delta import DeltaLakeTable

            return DeltaLakeTable(output.path, ds, config.surface)
    except ImportError as err:
        raise ConfigError(
            f"output.format: {output.format} needs a package that is not installed",
            got=str(err),
            do=f"pip install 'nightshelf[{output.format}]'",
        ) from err
    return ParquetTable(output.path, ds, config.surface)


def check_output(
    config: RunConfig, user_id: IdType | None = None, item_id: IdType | None = None
) -> None:
    """Say before a run what would stop its publish. The types of ids may not be known yet.

    Raises:
        ConfigError: a package is missing, a place cannot be written, or what is there cannot be
            published to: another format, columns, partitions, features, files of somebody else.
        StorageError: the table could not be read.
    """
    if config.surface == NULL_PARTITION:
        raise ConfigError(
            "surface is the name that tables give to null", got=quoted(NULL_PARTITION)
        )
    _check_quarantine_apart(config)
    table = open_table(config)
    users, items = ([one] if one else get_args(IdType) for one in (user_id, item_id))
    problems = []
    for ids in itertools.product(users, items):
        try:
            table.check(published_schema(config, *ids, _embedding_width(config)))
        except ConfigError as err:
            problems.append(err)
            if "another type" not in str(err):
                break
        else:
            problems = []
            break
    if problems:
        raise problems[0]
    if config.output.quarantine is not None:
        names = [name for name in QUARANTINE.names if name not in ("ds", "surface")]
        schema = pa.schema([QUARANTINE.field(name) for name in names])
        open_table(config, quarantine=True).check(schema)


def _embedding_width(config: RunConfig) -> int | None:
    """Numbers of the vectors that the run will give, as the model's own settings say."""
    if config.task.gives_lists:
        return None
    fixed = spec_of(config.engine.backend).embedding_width
    if fixed is not None:
        return fixed
    try:
        found = json.loads((Path(config.engine.model or "") / "config.json").read_text("utf-8"))
    except (OSError, ValueError):  # of a backend of one's own; a model without it is told elsewhere
        return None
    width = (found.get("text_config") or found).get("hidden_size")
    return width if isinstance(width, int) else None


def _check_quarantine_apart(config: RunConfig) -> None:
    """The quarantine is a table of its own: in the other's place each would replace the other."""
    output = config.output
    if output.quarantine is None:
        return
    if output.format == "iceberg":
        mixed = output.quarantine == output.table_name
    else:
        mine, theirs = (_place(path) for path in (output.path, output.quarantine))
        mixed = f"{mine}/".startswith(f"{theirs}/") or f"{theirs}/".startswith(f"{mine}/")
    if mixed:
        raise ConfigError(
            "output.quarantine is in the place of the table",
            expected="a table of its own, beside the other",
            got=quoted(output.quarantine),
            field="output.quarantine",
        )


def _place(path: str) -> str:
    """A path as one text, however it is written."""
    local = files.local_path(path)
    return (os.path.realpath(local) if local is not None else path).rstrip("/")

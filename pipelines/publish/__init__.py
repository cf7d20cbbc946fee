"""Publish: the one step that makes a run's rows visible. One module per table format."""

from __future__ import annotations

from pipelines.publish.names import NULL_PARTITION
from pipelines.publish.parquet import ParquetTable, read_current
from pipelines.publish.rows import RunRows
from pipelines.publish.table import PublishedTable
from schemas.errors import ConfigError, quoted
from schemas.runs import Published, RunPlan, ShardReceipt
from schemas.settings import RunConfig

__all__ = ["check_output", "open_table", "publish_quarantine", "publish_run", "read_current"]


def publish_run(plan: RunPlan, receipts: list[ShardReceipt]) -> Published:
    """Publish a run that passed its audit, in the configured format.

    Publishing a run twice, or a new run over an old one, leaves exactly one set of rows; a run
    without rows leaves an empty partition.

    Raises:
        ConflictError: another publisher changed the partition meanwhile.
        StorageError: the table could not be read or written; publishing again completes it.
    """
    rows = RunRows(plan=plan, receipts=tuple(receipts))
    return open_table(plan.config, ds=plan.ds).replace(rows)


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


def check_output(config: RunConfig) -> None:
    """Say before a run what would stop its publish.

    Raises:
        ConfigError: a package is missing, a place cannot be written, or the table that is there
            has other columns or partitions.
    """
    if config.surface == NULL_PARTITION:
        raise ConfigError(
            "surface is the name that tables give to null", got=quoted(NULL_PARTITION)
        )
    open_table(config).check(config)

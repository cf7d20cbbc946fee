"""Parquet files as polars frames, through the same file systems as everything else."""

from __future__ import annotations

import polars as pl

from pipelines import files


def read_frame(path: str, columns: list[str] | None = None) -> pl.DataFrame:
    """One Parquet file.

    Raises:
        StorageError: the file is missing or damaged.
    """
    local = files.local_path(path)
    if local is not None:
        return pl.read_parquet(local, columns=columns, hive_partitioning=False, glob=False)
    frame = pl.from_arrow(files.read_parquet(path, columns))
    assert isinstance(frame, pl.DataFrame), "a table is a frame"
    return frame

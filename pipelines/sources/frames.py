"""Parquet files as polars frames, through the same file systems as everything else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import polars as pl
import pyarrow.parquet as pq

from pipelines.sources import input_files
from pipelines.sources.parquet_leaves import says_encrypted
from pipelines.storage import files
from pipelines.storage.storage_errors import translate, translated
from schemas.errors import StorageError


def read_frame(path: str, columns: list[str] | None = None) -> pl.DataFrame:
    """One Parquet file.

    Raises:
        StorageError: the file is missing or damaged.
    """
    local = files.local_path(path)
    if local is not None:
        with translated(path):
            return pl.read_parquet(local, columns=columns, hive_partitioning=False, glob=False)
    frame = pl.from_arrow(files.read_parquet(path, columns))
    assert isinstance(frame, pl.DataFrame), "a table is a frame"
    return frame


@contextmanager
def reading(table: str, paths: Sequence[str]) -> Iterator[None]:
    """Whoever reads an input's rows here: damaged ones become an error that names their file.

    Raises:
        TableError: rows of one of the files cannot be decoded.
        StorageError: something else went wrong with a disk, a store or a library.
    """
    try:
        yield
    except BaseException as err:  # a panic is none of Exception's
        ours = translate(err, paths[0] if len(paths) == 1 else f"{table}, {len(paths)} files")
        if not isinstance(ours, StorageError):
            raise
        for path in paths:  # polars does not say which file it was
            if (why := _damage(path)) is not None:
                raise input_files.unreadable(table, path, why) from err
        if ours is err:
            raise
        raise ours from err


def _damage(path: str) -> Exception | None:
    """Why a file cannot be read to its end; None: it can, or is gone."""
    fs, inside = files.filesystem(path)
    try:
        with fs.open(inside, "rb") as handle:
            parquet = pq.ParquetFile(handle, pre_buffer=False)
            for _ in parquet.iter_batches(use_threads=False):
                pass
    except Exception as err:
        # A column that needs a key is no damage: one that is read is refused before.
        return err if files.is_damage(err) and not says_encrypted(err) else None
    return None

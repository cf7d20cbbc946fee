"""The files that a run's finished shards left, as frames that polars streams."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl

from pipelines.storage import files
from schemas.errors import StorageError
from schemas.runs import RunManifest, StagedKind


@dataclass(frozen=True, slots=True)
class Staged:
    """A run that has ended, and a folder of this machine with its staged files."""

    manifest: RunManifest
    folder: Path

    def scan(self, kind: StagedKind) -> pl.LazyFrame | None:
        """Rows of one kind of all finished shards; None where there are none of the kind."""
        paths = [
            self.folder / receipt.files[kind].path
            for receipt in self.manifest.shards
            if kind in receipt.files
        ]
        return pl.scan_parquet(paths, hive_partitioning=False, glob=False) if paths else None


@contextmanager
def open_staged(manifest: RunManifest) -> Iterator[Staged]:
    """The staged files of a run; from a store, copies on this machine until the block ends.

    Raises:
        StorageError: files that receipts name are gone: `nightshelf gc` removes them.
    """
    run_dir = manifest.plan.run_dir
    named = [file.path for receipt in manifest.shards for file in receipt.files.values()]
    there = set(files.list_names(files.join(run_dir, "staged")))
    if missing := sorted(path for path in named if path.rpartition("/")[2] not in there):
        raise StorageError(
            "staged files of the run are gone",
            got=f"{len(missing)} of {len(named)} files, {missing[0]} among them",
            where=run_dir,
            do="A report reads them. Look at the page that the run itself wrote, report.html.",
        )
    local = files.local_path(run_dir)
    if local is not None:
        yield Staged(manifest, Path(local))
        return
    with TemporaryDirectory(prefix="nightshelf-report-") as copy:
        for path in named:
            _copy(files.join(run_dir, path), Path(copy) / path)
        yield Staged(manifest, Path(copy))


@files.retried
def _copy(source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    fs, inside = files.filesystem(source)
    with fs.open(inside, "rb") as theirs, target.open("wb") as ours:
        shutil.copyfileobj(theirs, ours)

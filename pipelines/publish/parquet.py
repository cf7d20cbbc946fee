"""A Hive-style Parquet table: `<path>/ds=…/surface=…/part-<generation>-<run>-<shard>.parquet`.

Which files are the partition is said outside the table, by pointers (see `pointer`): a folder that
holds anything but Parquet files and an empty `_SUCCESS` cannot be read by polars as a folder. Order
of a publish:

1. The run's files are written; on a disk beside the table, in an object store in their place.
2. `_SUCCESS` goes; on a disk the files are moved into the folder.
3. The next pointer is created: readers that follow pointers change from the old rows to the new.
4. Files that the pointer does not name go, `_SUCCESS` comes.

Names of files are never used twice, so that a reader which holds an old pointer finds the old rows
or a missing file, never others. A crash anywhere leaves the old pointer or the new one; publishing
again completes it. Files of an unfinished publish carry a generation; the next publish removes
those up to its own, and nothing of a publisher that started later.
"""

from __future__ import annotations

import datetime as dt
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipelines import files
from pipelines.publish import pointer as pointers
from pipelines.publish.names import partition_name as partition_name
from pipelines.publish.names import pointer_root
from pipelines.publish.names import record_path as record_path
from pipelines.publish.pointer import PointedFile, Pointer
from pipelines.publish.rows import RunRows, write_rows
from schemas.errors import AccessError, ConfigError, ConflictError, StorageError, quoted
from schemas.runs import Published
from schemas.settings import RunConfig

SUCCESS = "_SUCCESS"
_GENERATION = re.compile(r"^(?:part|new)-(\d{8})-")
_READS = 20  # a reader starts again when it was overtaken; a publish takes longer than a few reads


@dataclass(frozen=True, slots=True)
class ParquetTable:
    """One partition of a Parquet table."""

    path: str
    ds: str
    surface: str

    @property
    def partition(self) -> str:
        """The folder of the partition's files."""
        return files.join(self.path, partition_name(self.ds, self.surface))

    @property
    def _pointers(self) -> str:
        return pointers.pointer_folder(self.path, self.ds, self.surface)

    def check(self, config: RunConfig) -> None:
        """See `check_output`."""
        _, url, inside = self.path.rstrip("/").rpartition("://")
        if url and "/" not in inside and not self.path.startswith("memory:"):
            raise ConfigError(
                "output.path is a whole bucket",
                expected="a folder in it: pointers are kept beside it, in <output.path>.current",
                got=quoted(self.path),
            )
        try:
            files.check_writable(pointer_root(self.path), "the folder beside output.path")
        except AccessError as err:
            raise ConfigError(
                err.what,
                got=err.got,
                where=err.where,
                do="Pointers to the current files are kept there; choose an output.path one level "
                "deeper.",
            ) from err

    def current(self) -> Published | None:
        """What the latest pointer says."""
        found = pointers.latest(self._pointers)
        return None if found is None else self._published(found)

    def history(self) -> list[Published]:
        """What the pointers that are left say, the newest first."""
        numbers = pointers.generations(self._pointers)
        return [self._published(pointers.load(self._pointers, number)) for number in numbers]

    def replace(self, rows: RunRows) -> Published:
        """Publish a run's rows; see `PublishedTable.replace`."""
        run_id, layout = rows.plan.run_id, rows.plan.config.output.layout
        old = pointers.latest(self._pointers)
        if old is not None and (old.run_id, old.layout) == (run_id, layout) and self._whole(old):
            self._settle(old)  # a crash may have left that undone
            return self._published(old)
        generation = 1 if old is None else old.generation + 1
        try:
            return self._publish(rows, generation)
        except (ConflictError, StorageError) as err:
            # Who comes first removes what the others have written up to then.
            now = pointers.latest(self._pointers)
            if now is None or now.generation < generation:
                raise
            self._settle(now)
            if (now.run_id, now.layout) == (run_id, layout):
                return self._published(now)
            raise pointers.conflict(self.ds, self.surface, self.partition) from err

    def _publish(self, rows: RunRows, generation: int) -> Published:
        run_id, token = rows.plan.run_id, uuid.uuid4().hex
        waiting = self._waiting(f"{generation:08d}-{token}")
        written = self._write(rows, f"part-{generation:08d}-{run_id}", waiting)
        new = Pointer(
            generation=generation,
            token=token,
            run_id=run_id,
            ds=self.ds,
            surface=self.surface,
            layout=rows.plan.config.output.layout,
            partition=partition_name(self.ds, self.surface),
            files=written,
            rows=sum(file.rows for file in written),
            published_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        )
        if pointers.generations(self._pointers)[:1] not in ([], [generation - 1]):
            raise pointers.conflict(self.ds, self.surface, self.partition)  # before it is seen
        self._remove_success()
        if waiting is not None:
            self._move_in(waiting, new)
        pointers.create(self._pointers, new)
        self._settle(new)
        return self._published(new)

    def restore(self, old: Published) -> Published:
        """A Parquet table holds one set of rows; raises `StorageError`."""
        raise StorageError(
            "a Parquet table does not keep the rows of older runs",
            got=f"run {old.run_id}",
            where=self.partition,
        )

    def read(
        self,
        columns: list[str] | None = None,
        *,
        user_id: str | int | None = None,
        shard: int | None = None,
    ) -> pa.Table:
        """The rows of the latest pointer, whoever publishes meanwhile; see `PublishedTable.read`.

        Raises:
            StorageError: nothing is published, or a file of the latest pointer is missing.
        """
        for _ in range(_READS):
            pointer = self._latest()
            names = [file.name for file in pointer.files]
            here = [n for n in names if shard is None or n.endswith(f"-{shard:05d}.parquet")]
            try:
                tables = [self._read_file(name, columns, user_id) for name in here or names[:1]]
            except StorageError:
                now = pointers.latest(self._pointers)
                if now is None or now.generation == pointer.generation:
                    raise
                continue  # overtaken: the old files went while they were read
            return pa.concat_tables(tables)
        raise StorageError("the partition changed faster than it could be read", where=self.path)

    def parts(self) -> Iterator[pa.Table]:
        """The rows of the latest pointer, a file at a time; see `PublishedTable.parts`."""
        pointer = self._latest()
        for file in pointer.files:
            try:
                yield self._read_file(file.name, None, None)
            except StorageError as err:
                if self._latest().generation == pointer.generation:
                    raise
                raise ConflictError(
                    "the partition was replaced while it was read",
                    where=self.partition,
                    do="Run the same command again.",
                ) from err

    def _latest(self) -> pointers.Pointer:
        """The pointer that readers follow; `StorageError` where there is none."""
        pointer = pointers.latest(self._pointers)
        if pointer is None:
            raise StorageError(
                "nothing is published",
                got=f"ds {self.ds}, surface {self.surface!r}",
                where=self.path,
            )
        return pointer

    def _read_file(
        self, name: str, columns: list[str] | None, user_id: str | int | None
    ) -> pa.Table:
        path = files.join(self.partition, name)
        if user_id is None:
            return files.read_parquet(path, columns)
        wanted = None if columns is None else sorted({*columns, "user_id"})
        table = files.read_parquet(path, wanted)
        rows = table.filter(pc.equal(table["user_id"], pa.scalar(user_id, table["user_id"].type)))
        return rows if columns is None else rows.select(columns)

    def _waiting(self, name: str) -> str | None:
        """The folder where files wait on a disk; an object store cannot move them."""
        folder = files.local_path(self._pointers)
        return None if folder is None else f"{folder}/new-{name}"

    def _write(self, rows: RunRows, stem: str, waiting: str | None) -> tuple[PointedFile, ...]:
        """Write the run's files to where they wait, or are read, under names of their own."""
        if waiting is None:
            self._remove_success()
        written = []
        for shard, table in rows.shards():
            name = f"{stem}-{shard:05d}.parquet"
            size = _write_file(files.join(waiting or self.partition, name), table)
            written.append(PointedFile(name=name, rows=len(table), bytes=size))
        return tuple(written)

    def _move_in(self, waiting: str, new: Pointer) -> None:
        partition = files.local_path(self.partition)
        try:
            os.makedirs(str(partition), exist_ok=True)
            for file in new.files:
                _move(f"{waiting}/{file.name}", f"{partition}/{file.name}")
            os.rmdir(waiting)
        except OSError as err:
            raise StorageError(
                "the run's files could not be moved into the table",
                got=str(err),
                where=partition,
                do="Readers that follow the pointer see the old rows. Run the same command again.",
            ) from err

    def _remove_success(self) -> None:
        files.remove_if_there(files.join(self.partition, SUCCESS))

    def _whole(self, pointer: Pointer) -> bool:
        there = files.list_sizes(self.partition)
        return all(there.get(file.name) == file.bytes for file in pointer.files)

    def _settle(self, pointer: Pointer) -> None:
        """Remove what the pointer does not name, except files of a publisher that came later."""
        kept = {file.name for file in pointer.files}
        later = False
        for name in files.list_names(self.partition):
            if name in kept or ".parquet" not in name:
                continue
            if _generation(name) > pointer.generation:
                later = True
            else:
                files.remove_if_there(files.join(self.partition, name))
        folder = files.local_path(self._pointers)
        for name in files.list_names(self._pointers) if folder else ():
            if name.startswith("new-") and _generation(name) <= pointer.generation:
                shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
        if not later:
            _touch(files.join(self.partition, SUCCESS))

    def _published(self, pointer: Pointer) -> Published:
        return Published(
            table=self.path,
            partition=self.partition,
            files=tuple(file.name for file in pointer.files),
            rows=pointer.rows,
            run_id=pointer.run_id,
            format="parquet",
            version=str(pointer.generation),
            published_at=pointer.published_at,
        )


def read_current(path: str, ds: str, surface: str, columns: list[str] | None = None) -> pa.Table:
    """The rows of a Parquet partition as one publish left them, whoever publishes meanwhile.

    Raises:
        StorageError: nothing is published, or a file of it is missing.
    """
    return ParquetTable(path, ds, surface).read(columns)


def _generation(name: str) -> int:
    """The generation in a file's name; 0 for files that carry none."""
    match = _GENERATION.match(name)
    return int(match[1]) if match else 0


@files.retried
def _touch(path: str) -> None:
    """Create an empty file, which needs no draft: it is whole when it appears."""
    fs, inside = files.filesystem(path)
    try:
        fs.pipe_file(inside, b"")
    except OSError as err:
        raise StorageError("a file could not be written", got=str(err), where=path) from err


@files.retried
def _write_file(path: str, table: pa.Table) -> int:
    with files.atomic_target(path) as target:
        fs, inside = files.filesystem(target)
        with fs.open(inside, "wb") as handle:
            write_rows(handle, table)
    fs, inside = files.filesystem(path)
    fs.invalidate_cache()
    try:
        size: int = fs.info(inside)["size"]
    except FileNotFoundError as err:  # another publisher has cleared the folder away
        raise StorageError("a file is gone that was just written", where=path) from err
    return size


def _move(source: str, target: str) -> None:
    """Rename; or copy under another name first, where the table is a disk mounted by itself."""
    try:
        os.replace(source, target)
    except OSError as err:
        if err.errno != errno.EXDEV:
            raise
        draft = f"{target}.tmp"
        shutil.copyfile(source, draft)
        os.replace(draft, target)
        os.remove(source)

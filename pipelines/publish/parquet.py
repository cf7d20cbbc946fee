"""A Hive-style Parquet table: `<path>/ds=…/surface=…/part-<generation>-<run>-<shard>.parquet`.

Which files are the partition is said outside the table, by pointers (see `pointer`): a folder that
holds anything but Parquet files and an empty `_SUCCESS` cannot be read by polars as a folder. Order
of a publish:

1. The names of its files are noted beside the pointers; the files are written, on a disk beside the
   table, in an object store in their place.
2. `_SUCCESS` goes; on a disk the files are moved into the folder.
3. The next pointer is created: readers that follow pointers change from the old rows to the new.
4. Files of older pointers and of notes go, `_SUCCESS` comes.

Names of files are never used twice, so that a reader which holds an old pointer finds the old rows
or a missing file, never others. A crash anywhere leaves the old pointer or the new one; publishing
again completes it. Files of an unfinished publish carry a generation; the next publish removes
those up to its own, and nothing of a publisher that started later. A file that neither a pointer
nor a note names is somebody else's: nothing is published beside it, and it is never removed.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.publish import pointer as pointers
from pipelines.publish.lake_files import REPAIR, decoded, verified
from pipelines.publish.names import date_of, pointer_root
from pipelines.publish.names import partition_name as partition_name
from pipelines.publish.names import record_path as record_path
from pipelines.publish.partition_folder import PartitionFolder
from pipelines.publish.places import check_create, check_no_lake
from pipelines.publish.pointer import PointedFile, Pointer
from pipelines.publish.rows import Rows, encoded
from pipelines.storage import files
from schemas.errors import AccessError, ConfigError, ConflictError, StorageError, quoted
from schemas.runs import Published

_READS = 20  # a reader starts again when it was overtaken; a publish takes longer than a few reads
_WITHDRAWN = 50  # runs that a partition remembers as withdrawn


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

    @property
    def _folder(self) -> PartitionFolder:
        return PartitionFolder(self.partition, self._pointers)

    def check(self, schema: pa.Schema) -> None:
        """See `PublishedTable.check`."""
        _, url, inside = self.path.rstrip("/").rpartition("://")
        if url and "/" not in inside and not self.path.startswith("memory:"):
            raise ConfigError(
                "output.path is a whole bucket",
                expected="a folder in it: pointers are kept beside it, in <output.path>.current",
                got=quoted(self.path),
            )
        check_no_lake(self.path)
        try:
            files.check_writable(pointer_root(self.path), "the folder beside output.path")
            check_create(pointer_root(self.path))
        except AccessError as err:
            raise ConfigError(
                err.what,
                got=err.got,
                where=err.where,
                do="Pointers to the current files are kept there; choose an output.path one level "
                "deeper.",
            ) from err
        self._folder.check_ours()

    def current(self) -> Published | None:
        """What the latest pointer says."""
        found = pointers.latest(self._pointers)
        return None if found is None or not found.files else self._published(found)

    def history(self) -> list[Published]:
        """What the pointers that are left say, the newest first."""
        return [self._published(p) for p in pointers.history(self._pointers) if p.files]

    def dates(self) -> Iterator[tuple[str, str]]:
        """See `PublishedTable.dates`."""
        named = {date_of(name): name for name in files.list_names(pointer_root(self.path))}
        for ds in sorted((ds for ds in named if ds is not None), reverse=True):
            other = pointers.latest(pointers.pointer_folder(self.path, ds, self.surface))
            if other is not None and other.files:
                yield ds, other.run_id

    def is_withdrawn(self, run_id: str) -> bool:
        """See `PublishedTable.is_withdrawn`."""
        found = self._latest_or_none()
        return found is not None and run_id in found.withdrawn

    def replace(self, rows: Rows, *, withdraw: str | None = None) -> Published:
        """Publish a run's rows; see `PublishedTable.replace`."""
        self._folder.check_ours()
        run_id, layout = rows.run_id, rows.layout
        old = self._latest_or_none()
        withdrawn = _withdrawn(old, run_id, withdraw)
        there = old is not None and self._is(old, run_id, layout) and self._whole(old)
        if old is not None and there and old.withdrawn == withdrawn:
            self._folder.settle(old)  # a crash may have left that undone
            return self._published(old)
        return self._replace(rows, old, withdrawn)

    def _replace(self, rows: Rows, old: Pointer | None, withdrawn: tuple[str, ...]) -> Published:
        generation = 1 + max(pointers.generations(self._pointers), default=0)
        token = uuid.uuid4().hex
        try:
            new = self._pointer(generation, token, rows.run_id, rows.layout, withdrawn)
            return self._publish(rows, new, old)
        except (ConflictError, StorageError) as err:
            self._folder.forget(generation, token, _stem(generation, rows.run_id))
            # Who comes first removes what the others have written up to then.
            now = self._latest_or_none()
            if now is None or now.generation < generation:
                raise
            self._folder.settle(now)
            if self._is(now, rows.run_id, rows.layout):
                return self._published(now)
            raise pointers.conflict(self.ds, self.surface, self.partition) from err

    def _publish(self, rows: Rows, new: Pointer, old: Pointer | None) -> Published:
        stem = _stem(new.generation, new.run_id)
        waiting = self._folder.waiting(new.generation, new.token)
        self._folder.note(new.generation, new.token, stem)
        if waiting is None:
            self._folder.remove_success()
        written = []
        for shard, table in rows.shards():
            name, data = f"{stem}-{shard:05d}.parquet", encoded(table)
            files.write_bytes(files.join(waiting or self.partition, name), data)
            written.append(
                PointedFile(
                    name=name, rows=len(table), bytes=len(data), xxh3=files.hash_bytes(data)
                )
            )
        new = new.model_copy(
            update={"files": tuple(written), "rows": sum(file.rows for file in written)}
        )
        if pointers.generations(self._pointers)[:1] not in ([], [new.generation - 1]):
            raise pointers.conflict(self.ds, self.surface, self.partition)  # before it is seen
        self._folder.remove_success()
        if waiting is not None:
            self._folder.move_in(waiting, new)
        self._create(new, old)
        return self._published(new)

    def _create(self, new: Pointer, old: Pointer | None) -> None:
        pointers.create(self._pointers, new)
        self._folder.settle(new, old)

    def clear(self, *, withdraw: str | None = None) -> None:
        """See `PublishedTable.clear`."""
        old = self._latest_or_none()
        if old is None:
            return
        generation = 1 + max(pointers.generations(self._pointers), default=0)
        token, out = uuid.uuid4().hex, _withdrawn(old, "", withdraw)
        self._create(self._pointer(generation, token, "", old.layout, out), old)

    def restore(self, old: Published, *, withdraw: str | None = None) -> Published:
        """A Parquet table holds one set of rows; raises `StorageError`."""
        raise StorageError(
            "a Parquet table does not keep the rows of older runs",
            got=f"run {old.run_id}",
            where=self.partition,
        )

    def verify(self) -> int:
        """See `PublishedTable.verify`."""
        pointer = self._latest()
        self._folder.check_ours()
        for file in pointer.files:
            self._verified(file)
        return len(pointer.files)

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
                yield decoded(self._verified(file))
            except StorageError as err:
                now = pointers.latest(self._pointers)
                if now is not None and now.generation == pointer.generation:
                    raise
                raise ConflictError(
                    "the partition was replaced while it was read",
                    where=self.partition,
                    do="Run the same command again.",
                ) from err

    def _latest(self) -> Pointer:
        """The pointer that readers follow; `StorageError` where there is none."""
        pointer = pointers.latest(self._pointers)
        if pointer is None or not pointer.files:
            raise StorageError(
                "nothing is published",
                got=f"ds {self.ds}, surface {self.surface!r}",
                where=self.path,
            )
        return pointer

    def _latest_or_none(self) -> Pointer | None:
        """The latest pointer that can be read: a publish replaces a damaged one."""
        return next(iter(pointers.readable(self._pointers)), None)

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

    def _verified(self, file: PointedFile) -> bytes:
        path = files.join(self.partition, file.name)
        if not file.xxh3:
            raise StorageError(
                "a file was published without a hash, by an older version",
                where=path,
                do=REPAIR,
            )
        return verified(path, file.xxh3)

    def _is(self, pointer: Pointer, run_id: str, layout: str) -> bool:
        return bool(pointer.files) and (pointer.run_id, pointer.layout) == (run_id, layout)

    def _whole(self, pointer: Pointer) -> bool:
        try:
            for file in pointer.files:
                self._verified(file)
        except StorageError:
            return False
        return True

    def _pointer(
        self, generation: int, token: str, run_id: str, layout: str, withdrawn: tuple[str, ...]
    ) -> Pointer:
        """A pointer to nothing yet."""
        return Pointer(
            generation=generation,
            token=token,
            run_id=run_id,
            ds=self.ds,
            surface=self.surface,
            layout=layout,
            partition=partition_name(self.ds, self.surface),
            files=(),
            rows=0,
            published_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            withdrawn=withdrawn,
        )

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


def _stem(generation: int, run_id: str) -> str:
    return f"part-{generation:08d}-{run_id}"


def _withdrawn(old: Pointer | None, run_id: str, withdraw: str | None) -> tuple[str, ...]:
    """The runs that are withdrawn once `run_id` is published and `withdraw` taken back."""
    before = [run for run in (old.withdrawn if old else ()) if run not in (run_id, withdraw)]
    return tuple([*before, *([withdraw] if withdraw else [])][-_WITHDRAWN:])


def read_current(path: str, ds: str, surface: str, columns: list[str] | None = None) -> pa.Table:
    """The rows of a Parquet partition as one publish left them, whoever publishes meanwhile.

    Raises:
        StorageError: nothing is published, or a file of it is missing.
    """
    return ParquetTable(path, ds, surface).read(columns)

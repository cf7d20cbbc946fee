"""A Delta Lake table, partitioned by `ds` and `surface`, through deltalake (delta-rs).

A publish writes the run's files, then replaces the partition in one commit: readers hold a version
and never see anything between. The commit lands only on the version that was looked at; of two
publishers of one partition the second finds other files there and fails, one of another partition
only has to look again. Files carry their run and their hash in their names (see `lake_files`); the
run is stamped on the commit too (`nightshelf.run_id`), for the history.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from pipelines.publish import lake_files
from pipelines.publish.columns import check_width, missing_columns
from pipelines.publish.delta_features import check_features, statistics
from pipelines.publish.delta_open import as_ours, load
from pipelines.publish.delta_partition import DeltaPartition
from pipelines.publish.lake_files import (
    LiveFile,
    changed_by_others,
    check_rows,
    decoded,
    holds,
    parse,
    verified,
    whole,
)
from pipelines.publish.places import check_new_table, check_no_links, wait_for
from pipelines.publish.pointer import conflict
from pipelines.publish.rows import Rows, as_lists, fitted, with_partition
from pipelines.storage import files
from schemas.errors import ConfigError, NightshelfError, StorageError, quoted
from schemas.runs import Published

_PARTITION = ["ds", "surface"]
_PROPERTIES: dict[str, str | None] = {"delta.checkpointInterval": "20"}  # readers replay less
_retried = retry(
    retry=retry_if_exception_type(CommitFailedError),
    wait=wait_random_exponential(multiplier=0.05, max=5.0),
    stop=stop_after_attempt(20),
    reraise=True,
)


@dataclass(frozen=True, slots=True)
class DeltaLakeTable:
    """One partition of a Delta table."""

    path: str
    ds: str
    surface: str

    def check(self, schema: pa.Schema) -> None:
        """See `PublishedTable.check`."""
        if "%" in self.path:
            raise ConfigError(
                "output.path has a percent sign, which Delta takes for an escape",
                expected="a path without %",
                got=quoted(self.path),
            )
        check_no_links(self.path)
        with self._as_ours():
            table = self._load()
            if table is None:
                check_new_table(self.path, "delta")
            else:
                check_features(table, self.path)
                missing_columns(_arrow(table), self._whole(schema.empty_table()).schema, self.path)
                self._check_width(table, schema)

    def current(self) -> Published | None:
        """What the latest version says; see `PublishedTable.current`."""
        with self._as_ours():
            table = self._load()
            return None if table is None else self._partition.current(table)

    def history(self) -> list[Published]:
        """Publishes that the log still has, the newest first."""
        with self._as_ours():
            table = self._load()
            return [] if table is None else self._partition.history(table)

    def dates(self) -> Iterator[tuple[str, str]]:
        """See `PublishedTable.dates`."""
        with self._as_ours():
            table = self._load()
            if table is not None:
                yield from self._partition.dates(table)

    def is_withdrawn(self, run_id: str) -> bool:
        """See `PublishedTable.is_withdrawn`."""
        with self._as_ours():
            table = self._load()
            return table is not None and self._partition.withdrawals(table, run_id) % 2 == 1

    def replace(self, rows: Rows, *, withdraw: str | None = None) -> Published:
        """Publish a run's rows; see `PublishedTable.replace`."""
        schema = self._whole(rows.schema().empty_table()).schema
        with self._as_ours():
            table = self._table_for(schema)
            self._check_width(table, rows.schema())
            base = self._partition.live(table)
            if holds(base, rows.run_id) and self._undamaged(base):
                self._mark(rows.run_id, withdraw)
                return self._found(table)
            names, adds, count = [], [], 0
            for new in lake_files.encode(rows, as_lists):
                names.append(path := f"ds={self.ds}/{new.name}")
                files.write_bytes(files.join(self.path, path), new.data)
                adds.append(self._add(path, new.data))
                count += new.rows
            stamp = self._partition.stamp(rows.run_id, count)
            landed = self._commit(base, adds, stamp, rows.run_id, withdraw)
            if landed is None or landed[0] != frozenset(
                names
            ):  # another publisher's are there: ours are orphans
                for name in names:
                    with suppress(OSError, NightshelfError):
                        files.remove_if_there(files.join(self.path, name))
            if landed is None:
                raise conflict(self.ds, self.surface, self.path)
            return self._found(landed[1])

    def restore(self, old: Published, *, withdraw: str | None = None) -> Published:
        """Make an older version's files current again; see `PublishedTable.restore`."""
        with self._as_ours():
            table = self._load()
            if table is None:
                raise self._gone(old)
            base = self._partition.live(table)
            try:
                there = self._partition.live(DeltaTable(self.path, version=int(old.version)))
                if not holds(there, old.run_id):
                    raise self._gone(old)
                adds = []
                for file in there:
                    data = self._verified(file)
                    check_rows(decoded(data), old.run_id, self.path)
                    adds.append(self._add(file.path, data))
            except (DeltaError, OSError, ValueError, StorageError) as err:
                raise self._gone(old) from err
            stamp = self._partition.stamp(old.run_id, sum(file.rows for file in there))
            landed = self._commit(base, adds, stamp, old.run_id, withdraw)
            if landed is None:
                raise conflict(self.ds, self.surface, self.path)
            return self._found(landed[1])

    def clear(self, *, withdraw: str | None = None) -> None:
        """See `PublishedTable.clear`."""
        with self._as_ours():
            table = self._load()
            if table is None:
                return
            base, stamp = self._partition.live(table), self._partition.stamp("", 0)
            if self._commit(base, [], stamp, "", withdraw) is None:
                raise conflict(self.ds, self.surface, self.path)

    def verify(self) -> int:
        """See `PublishedTable.verify`."""
        with self._as_ours():
            live = self._partition.live(self._table_with_rows())
            if whole(live) is None:
                raise changed_by_others(live, self.path)
            for file in live:
                self._verified(file)
            return len(live)

    def read(
        self,
        columns: list[str] | None = None,
        *,
        user_id: str | int | None = None,
        shard: int | None = None,
    ) -> pa.Table:
        """Rows of the latest version; see `PublishedTable.read`."""
        with self._as_ours():
            table = self._table_with_rows()
            filters: Any = [("ds", "=", self.ds), ("surface", "=", self.surface)]
            if user_id is not None:
                filters.append(("user_id", "=", user_id))
            return table.to_pyarrow_table(columns=columns, filters=filters)

    def parts(self) -> Iterator[pa.Table]:
        """Rows of the latest version, file after file; see `PublishedTable.parts`."""
        with self._as_ours():
            table = self._table_with_rows()
            live = self._partition.live(table)
            if whole(live) is None:
                raise changed_by_others(live, self.path)
            schema = _arrow(table)
            for file in live:
                yield fitted(self._whole(decoded(self._verified(file))), schema)

    def _as_ours(self) -> AbstractContextManager[None]:
        return as_ours(self.path)

    def _load(self) -> DeltaTable | None:
        return load(self.path)

    @_retried
    def _table_for(self, schema: pa.Schema) -> DeltaTable:
        """The table, created where there is none; its columns must fit.

        Raises:
            ConfigError: it is a table that cannot be published to.
        """
        table = self._load()
        if table is None:
            table = wait_for(self._load, lambda: check_new_table(self.path, "delta"))
        if table is None:
            table = DeltaTable.create(
                self.path,
                schema=schema,
                mode="ignore",
                partition_by=_PARTITION,
                configuration=_PROPERTIES,
            )
        check_features(table, self.path)
        if missing := missing_columns(_arrow(table), schema, self.path):
            table.alter.add_columns(Schema.from_arrow(pa.schema(missing)).fields)
            table = DeltaTable(self.path)
        return table

    def _table_with_rows(self) -> DeltaTable:
        """The table; `StorageError` where nothing is published in the partition."""
        table = self._load()
        if table is None or not self._partition.live(table):
            raise StorageError(
                "nothing is published",
                got=f"ds {self.ds}, surface {self.surface!r}",
                where=self.path,
            )
        return table

    def _whole(self, rows: pa.Table) -> pa.Table:
        return with_partition(as_lists(rows), self.ds, self.surface)

    def _check_width(self, table: DeltaTable, schema: pa.Schema) -> None:
        if "embedding" in schema.names:
            some = table.to_pyarrow_dataset().head(1, columns=["embedding"])
            check_width(some, schema, self.path)

    @property
    def _partition(self) -> DeltaPartition:
        return DeltaPartition(self.path, self.ds, self.surface)

    def _found(self, table: DeltaTable) -> Published:
        found = self._partition.current(table)
        if found is None:
            raise conflict(self.ds, self.surface, self.path)
        return found

    def _verified(self, file: LiveFile) -> bytes:
        named = parse(file.path)
        if named is None:
            raise changed_by_others([file], self.path)
        return verified(files.join(self.path, file.path), named.xxh3)

    def _undamaged(self, live: list[LiveFile]) -> bool:
        try:
            return all(self._verified(file) for file in live)
        except StorageError:
            return False

    def _add(self, path: str, data: bytes) -> AddAction:
        return AddAction(
            path=path,
            size=len(data),
            partition_values={"ds": self.ds, "surface": self.surface},
            modification_time=int(time.time() * 1000),
            data_change=True,
            stats=statistics(data),
        )

    def _commit(
        self,
        base: list[LiveFile],
        adds: list[AddAction],
        stamp: dict[str, str],
        run_id: str,
        withdraw: str | None,
    ) -> tuple[frozenset[str], DeltaTable] | None:
        """Replace the partition by the files, if it still is what it was in `base`.

        Returns:
            The files that are there now, and the table that has them; None when another publisher's
            are there. Those of the same run, whole, are as good as ours.
        """
        wanted = frozenset(add.path for add in adds)

        @_retried
        def commit() -> tuple[frozenset[str], DeltaTable] | None:
            table = DeltaTable(self.path)
            now = self._partition.live(table)
            there = frozenset(file.path for file in now)
            if there != frozenset(file.path for file in base):
                ours = there == wanted or (run_id and holds(now, run_id))
                return (there, table) if ours else None  # an earlier try may have landed
            table.create_write_transaction(
                list(adds),
                "overwrite",
                table.schema(),
                partition_by=_PARTITION,
                partition_filters=[("ds", "=", self.ds), ("surface", "=", self.surface)],
                commit_properties=CommitProperties(
                    custom_metadata=stamp,
                    max_commit_retries=0,  # delta-rs would not look again at what is there
                    app_transactions=self._partition.marks(table, run_id, withdraw),
                ),
            )
            table.update_incremental()  # reads what was committed since, not the whole log
            return wanted, table

        return commit()

    def _mark(self, run_id: str, withdraw: str | None) -> None:
        """Note withdrawals without a change of the rows."""
        table = DeltaTable(self.path)
        if marks := self._partition.marks(table, run_id, withdraw):
            table.create_write_transaction(
                [],
                "append",
                table.schema(),
                partition_by=_PARTITION,
                commit_properties=CommitProperties(app_transactions=marks),
            )

    def _gone(self, old: Published) -> StorageError:
        return StorageError(
            "the table no longer holds the rows of this run",
            got=f"run {old.run_id}, version {old.version}",
            where=self.path,
        )


def _arrow(table: DeltaTable) -> pa.Schema:
    return pa.schema(table.schema().to_arrow())

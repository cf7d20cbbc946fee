"""An Iceberg table, partitioned by the values of `ds` and `surface`, through pyiceberg.

A publish writes the run's files, then replaces the partition in one transaction: delete where ds
and surface, add the files. Readers hold a snapshot and never see anything between. The run is
stamped on the snapshots (`nightshelf.run_id`) and stands in every row. Of two publishers of one
partition the second fails, also when the partition was empty: the delete is checked against what
was added since. Publishers of other partitions only make it try again.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NotInstalledError, ValidationException
from pyiceberg.expressions import And, BooleanExpression, EqualTo, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Snapshot, ancestors_of
from sqlalchemy.exc import SQLAlchemyError

from pipelines import files
from pipelines.publish.columns import check_columns
from pipelines.publish.iceberg_catalog import (
    check_partitions,
    load_table,
    local_root,
    open_catalog,
    retried,
    table_for,
)
from pipelines.publish.names import partition_name
from pipelines.publish.pointer import conflict
from pipelines.publish.rows import RunRows, with_partition, write_rows
from schemas.errors import ConfigError, NightshelfError, StorageError, quoted
from schemas.runs import Published
from schemas.settings import OutputSettings, RunConfig

_STAMP = "nightshelf."


@dataclass(frozen=True, slots=True)
class _State:
    """The partition in one snapshot of the table."""

    stamp: Snapshot | None  # the last publish of this partition that the table remembers
    paths: frozenset[str]
    rows: int


class IcebergTable:
    """One partition of an Iceberg table."""

    def __init__(self, output: OutputSettings, ds: str, surface: str) -> None:
        self._output, self._ds, self._surface = output, ds, surface

    def current(self) -> Published | None:
        """What the current snapshot says; see `PublishedTable.current`."""
        with self._open() as catalog:
            table = load_table(catalog, self._output.table_name)
            return None if table is None else self._published(table, self._state(table))

    def history(self) -> list[Published]:
        """Publishes among the snapshots that the table keeps, the newest first."""
        with self._open() as catalog:
            table = load_table(catalog, self._output.table_name)
            if table is None:
                return []
            stamps = [s for s in self._stamps(table) if _operation(s) is Operation.APPEND]
            return [self._as_published(stamp, (), _stamped(stamp, "rows")) for stamp in stamps]

    def replace(self, rows: RunRows) -> Published:
        """Publish a run's rows; see `PublishedTable.replace`."""
        with self._open() as catalog:
            schema = with_partition(rows.schema().empty_table(), self._ds, self._surface).schema
            table = table_for(catalog, self._output.table_name, schema)
            base = self._state(table)
            run_id = rows.plan.run_id
            if _is_current(base, run_id) and (done := self._published(table, base)):
                return done
            paths, count = self._write(table, rows)
            return self._commit(catalog, base, paths, run_id, count, written=paths)

    def restore(self, old: Published) -> Published:
        """Make an older snapshot's files of the partition current; see `PublishedTable.restore`."""
        with self._open() as catalog:
            table = load_table(catalog, self._output.table_name)
            snapshot = None if table is None else table.snapshot_by_id(int(old.version))
            if table is None or snapshot is None:
                raise self._gone(old)
            tasks = list(table.scan(self._where, snapshot_id=int(old.version)).plan_files())
            paths = [task.file.file_path for task in tasks]
            if not all(table.io.new_input(path).exists() for path in paths):
                raise self._gone(old)
            return self._commit(
                catalog, self._state(table), paths, old.run_id, _stamped(snapshot, "rows")
            )

    def read(
        self,
        columns: list[str] | None = None,
        *,
        user_id: str | int | None = None,
        shard: int | None = None,
    ) -> pa.Table:
        """Rows of the current snapshot; see `PublishedTable.read`."""
        with self._open() as catalog:
            table = self._table_with_rows(catalog)
            where = self._where
            if user_id is not None:
                where = And(where, _equals("user_id", user_id))
            return table.scan(where, selected_fields=tuple(columns or ("*",))).to_arrow()

    def parts(self) -> Iterator[pa.Table]:
        """Rows of the current snapshot, batch after batch; see `PublishedTable.parts`."""
        with self._open() as catalog:
            reader = self._table_with_rows(catalog).scan(self._where).to_arrow_batch_reader()
            for batch in reader:
                yield pa.Table.from_batches([batch])

    def _table_with_rows(self, catalog: Catalog) -> Table:
        """The table; `StorageError` where nothing is published in the partition."""
        table = load_table(catalog, self._output.table_name)
        if table is None or self._published(table, self._state(table)) is None:
            raise StorageError(
                "nothing is published",
                got=f"ds {self._ds}, surface {self._surface!r}",
                where=self._output.table_name,
            )
        return table

    def check(self, config: RunConfig) -> None:
        """See `check_output`. Creates nothing."""
        default = not self._output.catalog
        if default and not os.path.exists(f"{local_root(self._output)}/catalog.db"):
            return
        with self._open() as catalog:
            table = load_table(catalog, self._output.table_name)
            if table is not None:
                check_partitions(table)
                check_columns(config, table.schema().as_arrow(), self._output.table_name)

    @property
    def _where(self) -> BooleanExpression:
        return And(_equals("ds", self._ds), _equals("surface", self._surface))

    @contextmanager
    def _open(self) -> Iterator[Catalog]:
        """The catalog; its errors become ours. They share no base but `Exception`."""
        try:
            catalog = open_catalog(self._output)
            try:
                yield catalog
            finally:
                catalog.close()
        except NightshelfError:
            raise
        except NotInstalledError as err:
            raise ConfigError(
                "output.catalog needs a package that is not installed", got=_first_line(err)
            ) from err
        except Exception as err:  # of the catalog, its store or its database: one kind for users
            raise StorageError(
                f"the Iceberg table could not be used: {type(err).__name__}",
                got=_first_line(err),
                where=self._output.table_name,
                do="Its rows are as they were. Running the same command again is safe.",
            ) from err

    def _stamps(self, table: Table) -> Iterator[Snapshot]:
        """Snapshots that publishes of this partition left, the newest first."""
        mine = (self._ds, self._surface)
        for snapshot in ancestors_of(table.current_snapshot(), table.metadata):
            summary = snapshot.summary
            if summary and (summary[f"{_STAMP}ds"], summary[f"{_STAMP}surface"]) == mine:
                yield snapshot

    def _state(self, table: Table) -> _State:
        tasks = [task.file for task in table.scan(self._where).plan_files()]
        return _State(
            stamp=next(self._stamps(table), None),
            paths=frozenset(file.file_path for file in tasks),
            rows=sum(file.record_count for file in tasks),
        )

    def _write(self, table: Table, rows: RunRows) -> tuple[list[str], int]:
        """Write the run's files where the table keeps its data. No snapshot names them yet."""
        provider = table.location_provider()
        paths, count = [], 0
        for shard, part in rows.shards():
            if len(part) == 0:
                continue
            name = f"{rows.plan.run_id}-{shard:05d}-{uuid.uuid4().hex[:8]}.parquet"
            path = provider.new_data_location(name)
            with table.io.new_output(path).create() as stream:
                write_rows(stream, with_partition(part, self._ds, self._surface))
            paths.append(path)
            count += len(part)
        return paths, count

    def _commit(
        self,
        catalog: Catalog,
        base: _State,
        paths: list[str],
        run_id: str,
        rows: int,
        written: list[str] | None = None,
    ) -> Published:
        """Replace the partition by the files, if it still is what it was in `base`."""
        stamp = {"run_id": run_id, "ds": self._ds, "surface": self._surface, "rows": str(rows)}
        properties = {f"{_STAMP}{key}": value for key, value in stamp.items()}

        @retried
        def commit() -> bool:
            table = catalog.load_table(self._output.table_name)
            now = self._state(table)
            if now.paths != base.paths or now.stamp != base.stamp:
                return _is_current(now, run_id)  # an earlier try of ours may have landed
            tx = table.transaction()
            if base.paths:
                tx.delete(self._where, snapshot_properties=properties)
            else:  # deletes nothing, and makes files that others add meanwhile a conflict
                with tx.update_snapshot(snapshot_properties=properties).delete() as nothing:
                    nothing.delete_by_predicate(self._where)
            if paths:
                tx.add_files(paths, snapshot_properties=properties)
            else:
                tx.append(table.schema().as_arrow().empty_table(), properties)
            try:
                tx.commit_transaction()
            except ValidationException:
                return False
            return True

        if not commit():
            for path in written or ():
                with suppress(OSError):  # nobody names them; what stays is an orphan
                    table_io = catalog.load_table(self._output.table_name).io
                    table_io.delete(path)
            raise conflict(self._ds, self._surface, self._output.table_name)
        table = catalog.load_table(self._output.table_name)
        done = self._published(table, self._state(table))
        assert done is not None, "a publish leaves its stamp"
        return done

    def _published(self, table: Table, state: _State) -> Published | None:
        if state.stamp is not None:
            return self._as_published(state.stamp, tuple(sorted(state.paths)), state.rows)
        if not state.paths:
            return None
        # The publish's snapshot has expired; its rows say whose they are.
        runs = table.scan(self._where, selected_fields=("run_id",), limit=1).to_arrow()
        return Published(
            table=self._output.table_name,
            partition=files.join(self._output.table_name, partition_name(self._ds, self._surface)),
            files=tuple(sorted(state.paths)),
            rows=state.rows,
            run_id=runs["run_id"][0].as_py(),
            format="iceberg",
        )

    def _as_published(self, stamp: Snapshot, paths: tuple[str, ...], rows: int) -> Published:
        assert stamp.summary is not None, "a stamp is in a summary"
        at = datetime.fromtimestamp(stamp.timestamp_ms / 1000, UTC)
        return Published(
            table=self._output.table_name,
            partition=files.join(self._output.table_name, partition_name(self._ds, self._surface)),
            files=paths,
            rows=rows,
            run_id=stamp.summary[f"{_STAMP}run_id"] or "",
            format="iceberg",
            version=str(stamp.snapshot_id),
            published_at=at.isoformat(timespec="seconds"),
        )

    def _gone(self, old: Published) -> StorageError:
        return StorageError(
            "the table no longer holds the rows of this run",
            got=f"run {old.run_id}, snapshot {old.version}",
            where=self._output.table_name,
        )


def _equals(column: str, value: str | int) -> BooleanExpression:
    return EqualTo(term=Reference(column), value=literal(value))


def _is_current(state: _State, run_id: str) -> bool:
    """Whether the partition holds what this run published, and all of it."""
    stamp = state.stamp
    return (
        stamp is not None
        and stamp.summary is not None
        and stamp.summary[f"{_STAMP}run_id"] == run_id
        and _stamped(stamp, "rows") == state.rows
    )


def _stamped(snapshot: Snapshot, key: str) -> int:
    value = snapshot.summary[f"{_STAMP}{key}"] if snapshot.summary else None
    return int(value or 0)


def _operation(snapshot: Snapshot) -> Operation | None:
    return snapshot.summary.operation if snapshot.summary else None


def _first_line(error: BaseException) -> str:
    if isinstance(error, SQLAlchemyError) and error.args:
        return quoted(str(error.args[0]))  # without the statement and its parameters
    return quoted(str(error).strip().partition("\n")[0])

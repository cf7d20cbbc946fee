"""An Iceberg table, partitioned by the values of `ds` and `surface`, through pyiceberg.

A publish writes the run's files, then replaces the partition in one transaction: delete where ds
and surface, add the files. Readers hold a snapshot and never see anything between. Files carry
their run and their hash in their names (see `lake_files`); the run is stamped on the snapshots too
(`nightshelf.run_id`), for the history and for runs without rows. Of two publishers of one partition
the second fails, also when the partition was empty: the delete is checked against what was added
since. Publishers of other partitions only make it try again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NotInstalledError, ValidationException
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from pipelines.publish import lake_files
from pipelines.publish.columns import check_width, missing_columns
from pipelines.publish.iceberg_catalog import (
    check_local_root,
    check_not_lost,
    check_table,
    first_line,
    load_table,
    local_root,
    open_catalog,
    retried,
    table_for,
)
from pipelines.publish.iceberg_commit import OneLook
from pipelines.publish.iceberg_partition import IcebergPartition, State, data_file, stamped
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
from pipelines.publish.places import wait_for
from pipelines.publish.pointer import conflict
from pipelines.publish.rows import Rows, as_lists, fitted, with_partition
from schemas.errors import ConfigError, NightshelfError, StorageError, is_panic
from schemas.runs import Published
from schemas.settings import OutputSettings


class IcebergTable:
    """One partition of an Iceberg table."""

    def __init__(self, output: OutputSettings, ds: str, surface: str) -> None:
        self._output, self._ds, self._surface = output, ds, surface
        self._name = output.table_name
        self._partition = IcebergPartition(output.table_name, ds, surface)

    def check(self, schema: pa.Schema) -> None:
        """See `PublishedTable.check`."""
        check_local_root(self._output)
        if self._is_new():
            check_not_lost(self._output)
            return
        with self._open() as catalog:
            table = load_table(catalog, self._name)
            if table is None:
                check_not_lost(self._output)
                return
            mine = self._whole(schema.empty_table()).schema
            check_table(table, mine)
            missing_columns(table.schema().as_arrow(), mine, self._name)
            self._check_width(table, schema)

    def _is_new(self) -> bool:
        """Whether the default catalog is to be made."""
        if self._output.catalog:
            return False
        return not os.path.exists(f"{local_root(self._output)}/catalog.db")

    def current(self) -> Published | None:
        """What the current snapshot says; see `PublishedTable.current`."""
        with self._loaded() as table:
            return None if table is None else self._partition.current(table)

    def history(self) -> list[Published]:
        """Publishes among the snapshots that the table keeps, the newest first."""
        with self._loaded() as table:
            return [] if table is None else self._partition.history(table)

    def dates(self) -> Iterator[tuple[str, str]]:
        """See `PublishedTable.dates`."""
        with self._loaded() as table:
            if table is not None:
                yield from self._partition.dates(table)

    def is_withdrawn(self, run_id: str) -> bool:
        """See `PublishedTable.is_withdrawn`."""
        with self._loaded() as table:
            return table is not None and run_id in self._partition.withdrawn(table)

    def replace(self, rows: Rows, *, withdraw: str | None = None) -> Published:
        """Publish a run's rows; see `PublishedTable.replace`."""
        if self._is_new():  # before the catalog is made
            wait_for(lambda: None if self._is_new() else True, lambda: check_not_lost(self._output))
        with self._open() as catalog:
            schema = self._whole(rows.schema().empty_table()).schema
            table = table_for(catalog, self._output, schema)
            self._check_width(table, rows.schema())
            base = self._partition.state(table)
            if self._is_current(table, base, rows.run_id):
                self._mark(table, rows.run_id, withdraw)
                return self._found(table)
            written, count = [], 0
            provider, arrow = table.location_provider(), table.schema().as_arrow()
            encoding: Callable[[pa.Table], pa.Table] = lambda part: fitted(self._whole(part), arrow)  # noqa: E731
            for new in lake_files.encode(rows, encoding):
                count += new.rows
                if new.rows:  # a run without rows leaves a stamp and no file
                    path = provider.new_data_location(new.name)
                    with table.io.new_output(path).create() as stream:
                        stream.write(new.data)
                    written.append(data_file(table, path, new.data, self._ds, self._surface))
            landed = self._commit(catalog, base, written, rows.run_id, count, withdraw)
            mine = {file.file_path for file in written}
            if landed is None or landed[0] - mine:
                for path in mine:
                    # Nobody names them; what stays is an orphan.
                    with suppress(OSError, NightshelfError):
                        table.io.delete(path)
            if landed is None:
                raise conflict(self._ds, self._surface, self._name)
            return self._found(landed[1])

    def restore(self, old: Published, *, withdraw: str | None = None) -> Published:
        """Make an older snapshot's files of the partition current; see `PublishedTable.restore`."""
        with self._open() as catalog:
            table = load_table(catalog, self._name)
            snapshot = None if table is None else table.snapshot_by_id(int(old.version))
            if table is None or snapshot is None:
                raise self._gone(old)
            there = list(
                table.scan(self._partition.where, snapshot_id=int(old.version)).plan_files()
            )
            live = self._partition.live(there)
            rows = sum(file.rows for file in live)
            if not holds(live, old.run_id) and (live or stamped(snapshot, "rows")):
                raise self._gone(old)
            try:
                for file in live:
                    check_rows(decoded(self._verified(table, file)), old.run_id, self._name)
            except (OSError, StorageError) as err:
                raise self._gone(old) from err
            adds = [task.file for task in there]
            base = self._partition.state(table)
            landed = self._commit(catalog, base, adds, old.run_id, rows, withdraw)
            if landed is None:
                raise conflict(self._ds, self._surface, self._name)
            return self._found(landed[1])

    def clear(self, *, withdraw: str | None = None) -> None:
        """See `PublishedTable.clear`."""
        with self._open() as catalog:
            table = load_table(catalog, self._name)
            if table is None:
                return
            base = self._partition.state(table)
            if self._commit(catalog, base, [], "", 0, withdraw) is None:
                raise conflict(self._ds, self._surface, self._name)

    def verify(self) -> int:
        """See `PublishedTable.verify`."""
        with self._loaded() as found:
            table = self._with_rows(found)
            live = self._partition.state(table).live
            if live and whole(live) is None:
                raise changed_by_others(live, self._name)
            for file in live:
                self._verified(table, file)
            return len(live)

    def read(
        self,
        columns: list[str] | None = None,
        *,
        user_id: str | int | None = None,
        shard: int | None = None,
    ) -> pa.Table:
        """Rows of the current snapshot; see `PublishedTable.read`."""
        with self._loaded() as found:
            table = self._with_rows(found)
            where = self._partition.where_user(user_id)
            return table.scan(where, selected_fields=tuple(columns or ("*",))).to_arrow()

    def parts(self) -> Iterator[pa.Table]:
        """Rows of the current snapshot, file after file; see `PublishedTable.parts`."""
        with self._loaded() as found:
            table = self._with_rows(found)
            live = self._partition.state(table).live
            if live and whole(live) is None:
                raise changed_by_others(live, self._name)
            arrow = table.schema().as_arrow()
            for file in live:
                yield fitted(decoded(self._verified(table, file)), arrow)

    def _with_rows(self, table: Table | None) -> Table:
        """The table; `StorageError` where nothing is published in the partition."""
        if table is None or not self._partition.is_published(table):
            raise StorageError(
                "nothing is published",
                got=f"ds {self._ds}, surface {self._surface!r}",
                where=self._name,
            )
        return table

    @contextmanager
    def _loaded(self) -> Iterator[Table | None]:
        """The table, to be looked at: nothing is made where there is none."""
        if self._is_new():
            yield None
            return
        with self._open() as catalog:
            yield load_table(catalog, self._name)

    @contextmanager
    def _open(self) -> Iterator[Catalog]:
        """The catalog; its errors become ours. They share no base but `Exception`."""
        try:
            catalog = open_catalog(self._output)
            try:
                yield catalog
            finally:
                catalog.close()
        except (NightshelfError, GeneratorExit):
            raise
        except NotInstalledError as err:
            raise ConfigError(
                "output.catalog needs a package that is not installed", got=first_line(err)
            ) from err
        except BaseException as err:  # of the catalog, its store or its database: one for users
            if not isinstance(err, Exception) and not is_panic(err):
                raise
            raise StorageError(
                f"the Iceberg table could not be used: {type(err).__name__}",
                got=first_line(err),
                where=self._name,
                do="Its rows are as they were.",
            ) from err

    def _whole(self, rows: pa.Table) -> pa.Table:
        return with_partition(as_lists(rows), self._ds, self._surface)

    def _check_width(self, table: Table, schema: pa.Schema) -> None:
        if "embedding" in schema.names and table.current_snapshot() is not None:
            some = table.scan(selected_fields=("embedding",), limit=1).to_arrow()
            check_width(some, schema, self._name)

    def _is_current(self, table: Table, base: State, run_id: str) -> bool:
        """Whether readers see what this run published, whole and undamaged."""
        if not base.live:
            return base.empty_of == run_id
        try:
            return holds(base.live, run_id) and all(
                self._verified(table, file) for file in base.live
            )
        except StorageError:
            return False

    def _verified(self, table: Table, file: LiveFile) -> bytes:
        named = parse(file.path)
        if named is None:
            raise changed_by_others([file], self._name)

        def content(path: str) -> bytes:
            with table.io.new_input(path).open() as stream:
                return bytes(stream.read())

        return verified(file.path, named.xxh3, content)

    def _found(self, table: Table) -> Published:
        found = self._partition.current(table)
        if found is None:
            raise conflict(self._ds, self._surface, self._name)
        return found

    def _mark(self, table: Table, run_id: str, withdraw: str | None) -> None:
        """Note withdrawals without a change of the rows."""
        properties = self._partition.marks(table, run_id, withdraw)
        if properties:
            with OneLook(table) as tx:
                tx.set_properties(properties)

    def _commit(
        self,
        catalog: Catalog,
        base: State,
        adds: list[DataFile],
        run_id: str,
        rows: int,
        withdraw: str | None,
    ) -> tuple[frozenset[str], Table] | None:
        """Replace the partition by the files, if it still is what it was in `base`.

        Returns:
            The files that are there now, and the table that has them; None when another publisher's
            are there. Those of the same run, whole, are as good as ours.
        """
        wanted = frozenset(file.file_path for file in adds)
        where, stamp = self._partition.where, self._partition.stamp(run_id, rows)

        @retried
        def commit() -> tuple[frozenset[str], Table] | None:
            table = catalog.load_table(self._name)
            now = self._partition.state(table)
            if (now.paths, now.last) != (base.paths, base.last):
                same = run_id and (holds(now.live, run_id) or now.empty_of == run_id)
                return (now.paths, table) if same else None  # an earlier try may have landed
            tx = OneLook(table)
            # Where there is nothing to delete, it makes files that others add a conflict.
            with tx.update_snapshot(snapshot_properties=stamp).delete() as delete:
                delete.delete_by_predicate(where)
            with tx.update_snapshot(snapshot_properties=stamp).merge_append() as append:
                for file in adds:
                    append.append_data_file(file)
            if properties := self._partition.marks(table, run_id, withdraw):
                tx.set_properties(properties)
            try:
                return wanted, tx.commit_transaction()
            except ValidationException:
                return None

        return commit()

    def _gone(self, old: Published) -> StorageError:
        return StorageError(
            "the table no longer holds the rows of this run",
            got=f"run {old.run_id}, snapshot {old.version}",
            where=self._name,
        )

"""A Delta Lake table, partitioned by `ds` and `surface`, through deltalake (delta-rs).

A publish is one commit: overwrite where ds and surface. Readers hold a version and never see
anything between; delta-rs refuses rows outside the predicate. The run is stamped on the commit
(`nightshelf.run_id`) and stands in every row. Of two publishers of one partition the second fails;
delta-rs tells it from one of another partition by the predicate, and tries again for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.dataset as pads
from deltalake import CommitProperties, DeltaTable, Schema, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from pipelines import files
from pipelines.publish.columns import check_columns, missing_columns
from pipelines.publish.names import partition_name
from pipelines.publish.pointer import conflict
from pipelines.publish.rows import RunRows, rows_per_group, with_partition
from schemas.errors import ConfigError, NightshelfError, StorageError, quoted
from schemas.runs import Published
from schemas.settings import RunConfig

_STAMP = "nightshelf."
_BATCH_ROWS = 8192
_retried = retry(
    retry=retry_if_exception_type(CommitFailedError),
    wait=wait_random_exponential(multiplier=0.05, max=5.0),
    stop=stop_after_attempt(10),
    reraise=True,
)


@dataclass(frozen=True, slots=True)
class _State:
    """The partition in one version of the table."""

    stamp: dict[str, Any] | None  # the last publish of this partition that the log remembers
    paths: frozenset[str]
    rows: int


@dataclass(frozen=True, slots=True)
class DeltaLakeTable:
    """One partition of a Delta table."""

    path: str
    ds: str
    surface: str

    def current(self) -> Published | None:
        """What the latest version says; see `PublishedTable.current`."""
        with self._as_ours():
            table = self._load()
            return None if table is None else self._published(table, self._state(table))

    def history(self) -> list[Published]:
        """Publishes that the log still has, the newest first."""
        with self._as_ours():
            table = self._load()
            if table is None:
                return []
            return [self._as_published(e, (), _rows(e)) for e in self._stamps(table)]

    def replace(self, rows: RunRows) -> Published:
        """Publish a run's rows; see `PublishedTable.replace`."""
        schema = with_partition(rows.schema().empty_table(), self.ds, self.surface).schema
        with self._as_ours():
            table = self._table_for(schema)
            base = self._state(table)
            if _is_current(base, rows.plan.run_id) and (done := self._published(table, base)):
                return done
            stream = _Stream(rows, pa.schema(table.schema().to_arrow()))
            try:
                return self._commit(base, rows.plan.run_id, rows.rows, stream.open)
            except Exception as err:  # whatever it is, ours behind it is what went wrong
                if stream.broken is not None:  # delta-rs made a text of it
                    raise stream.broken from err
                raise

    def restore(self, old: Published) -> Published:
        """Write the partition again as an older version has it; see `PublishedTable.restore`."""
        with self._as_ours():
            table = self._load()
            if table is None:
                raise self._gone(old)
            base = self._state(table)
            try:
                there = DeltaTable(self.path, version=int(old.version))
                scanner = there.to_pyarrow_dataset().scanner(filter=self._mine)
                counted = scanner.count_rows()
            except (DeltaError, OSError, pa.ArrowException) as err:
                raise self._gone(old) from err
            if counted != old.rows:
                raise self._gone(old)
            return self._commit(base, old.run_id, old.rows, scanner.to_reader)

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
            return table.to_pyarrow_table(columns=columns, filters=self._filters(user_id))

    def parts(self) -> Iterator[pa.Table]:
        """Rows of the latest version, batch after batch; see `PublishedTable.parts`."""
        with self._as_ours():
            data = self._table_with_rows().to_pyarrow_dataset()
            for batch in data.scanner(filter=self._mine).to_batches():
                yield pa.Table.from_batches([batch])

    def _table_with_rows(self) -> DeltaTable:
        """The table; `StorageError` where nothing is published in the partition."""
        table = self._load()
        if table is None or self._published(table, self._state(table)) is None:
            raise StorageError(
                "nothing is published",
                got=f"ds {self.ds}, surface {self.surface!r}",
                where=self.path,
            )
        return table

    @property
    def _mine(self) -> Any:
        return (pads.field("ds") == self.ds) & (pads.field("surface") == self.surface)

    def check(self, config: RunConfig) -> None:
        """See `check_output`. Creates nothing."""
        if "%" in self.path:
            raise ConfigError(
                "output.path has a percent sign, which Delta takes for an escape",
                expected="a path without %",
                got=quoted(self.path),
            )
        with self._as_ours():
            table = self._load()
            if table is not None:
                self._check_partitions(table)
                check_columns(config, pa.schema(table.schema().to_arrow()), self.path)

    def _filters(self, user_id: str | int | None) -> Any:
        filters = [("ds", "=", self.ds), ("surface", "=", self.surface)]
        return filters if user_id is None else [*filters, ("user_id", "=", user_id)]

    @contextmanager
    def _as_ours(self) -> Iterator[None]:
        """Turn the library's errors into ours. Where rows could not be read, it raises a plain
        `Exception`.
        """
        try:
            yield
        except NightshelfError:
            raise
        except Exception as err:  # delta-rs raises many kinds; a user gets one, with its words
            raise StorageError(
                f"the Delta table could not be used: {type(err).__name__}",
                got=quoted(str(err).strip().partition("\n")[0]),
                where=self.path,
                do="Its rows are as they were. Running the same command again is safe.",
            ) from err

    def _load(self) -> DeltaTable | None:
        try:
            return DeltaTable(self.path)
        except TableNotFoundError:
            return None

    @_retried
    def _table_for(self, schema: pa.Schema) -> DeltaTable:
        """The table, created where there is none; its columns must fit.

        Raises:
            ConfigError: it has other partitions, or columns of other types.
        """
        table = self._load()
        if table is None:
            table = DeltaTable.create(
                self.path, schema=schema, mode="ignore", partition_by=["ds", "surface"]
            )
        self._check_partitions(table)
        if missing := missing_columns(pa.schema(table.schema().to_arrow()), schema, self.path):
            table.alter.add_columns(Schema.from_arrow(pa.schema(missing)).fields)
            table = DeltaTable(self.path)
        return table

    def _check_partitions(self, table: DeltaTable) -> None:
        names = table.metadata().partition_columns
        if names != ["ds", "surface"]:
            raise ConfigError(
                "the Delta table has other partitions",
                expected="partitioned by ds, surface",
                got=", ".join(names) or "none",
                where=self.path,
            )

    def _stamps(self, table: DeltaTable) -> Iterator[dict[str, Any]]:
        """Commits that publishes of this partition left, the newest first."""
        for entry in table.history():
            if (entry.get(f"{_STAMP}ds"), entry.get(f"{_STAMP}surface")) == (self.ds, self.surface):
                yield entry

    def _state(self, table: DeltaTable) -> _State:
        found = pl.DataFrame(table.get_add_actions(flatten=True))
        rows = 0
        if len(found):
            found = found.filter(
                pl.col("partition.ds") == self.ds, pl.col("partition.surface") == self.surface
            )
            rows = int(found["num_records"].sum())
        return _State(
            stamp=next(self._stamps(table), None),
            paths=frozenset(found["path"].to_list()),
            rows=rows,
        )

    def _commit(self, base: _State, run_id: str, rows: int, reader: Any) -> Published:
        """Replace the partition, if it still is what it was in `base`."""
        stamp = {"run_id": run_id, "ds": self.ds, "surface": self.surface, "rows": rows}

        @_retried
        def commit() -> bool:
            table = DeltaTable(self.path)
            now = self._state(table)
            if now.paths != base.paths or now.stamp != base.stamp:
                return _is_current(now, run_id)  # an earlier try of ours may have landed
            data = reader()
            write_deltalake(
                table,
                data,
                mode="overwrite",
                predicate=f"ds = {_sql(self.ds)} AND surface = {_sql(self.surface)}",
                writer_properties=WriterProperties(
                    compression="ZSTD", max_row_group_size=rows_per_group(data.schema)
                ),
                commit_properties=CommitProperties(
                    custom_metadata={f"{_STAMP}{key}": value for key, value in stamp.items()}
                ),
            )
            return True

        if not commit():
            raise conflict(self.ds, self.surface, self.path)
        table = DeltaTable(self.path)
        done = self._published(table, self._state(table))
        assert done is not None, "a publish leaves its stamp"
        return done

    def _published(self, table: DeltaTable, state: _State) -> Published | None:
        if state.stamp is not None:
            return self._as_published(state.stamp, tuple(sorted(state.paths)), state.rows)
        if not state.paths:
            return None
        # The publish's commit has left the log; its rows say whose they are.
        mine = (pads.field("ds") == self.ds) & (pads.field("surface") == self.surface)
        runs = table.to_pyarrow_dataset().head(1, columns=["run_id"], filter=mine)
        return Published(
            table=self.path,
            partition=files.join(self.path, partition_name(self.ds, self.surface)),
            files=tuple(sorted(state.paths)),
            rows=state.rows,
            run_id=runs["run_id"][0].as_py(),
            format="delta",
        )

    def _as_published(self, stamp: dict[str, Any], paths: tuple[str, ...], rows: int) -> Published:
        at = datetime.fromtimestamp(stamp["timestamp"] / 1000, UTC)
        return Published(
            table=self.path,
            partition=files.join(self.path, partition_name(self.ds, self.surface)),
            files=paths,
            rows=rows,
            run_id=stamp[f"{_STAMP}run_id"],
            format="delta",
            version=str(stamp["version"]),
            published_at=at.isoformat(timespec="seconds"),
        )

    def _gone(self, old: Published) -> StorageError:
        return StorageError(
            "the table no longer holds the rows of this run",
            got=f"run {old.run_id}, version {old.version}",
            where=self.path,
        )


class _Stream:
    """A run's rows with all columns of the table, a batch at a time, anew for each try."""

    def __init__(self, rows: RunRows, there: pa.Schema) -> None:
        self.broken: NightshelfError | None = None
        self._rows = rows
        mine = self._whole(rows.schema().empty_table()).schema
        # Columns of other tasks, which delta-rs wants as well.
        self._others = [field for field in there if field.name not in mine.names]
        self._schema = pa.schema([*mine, *self._others])

    def open(self) -> pa.RecordBatchReader:
        """A reader from the first row on."""
        return pa.RecordBatchReader.from_batches(self._schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for _, part in self._rows.shards():
                table = self._whole(part)
                for field in self._others:
                    table = table.append_column(field, pa.nulls(len(table), field.type))
                yield from table.to_batches(max_chunksize=_BATCH_ROWS)
        except NightshelfError as err:
            self.broken = err
            raise

    def _whole(self, part: pa.Table) -> pa.Table:
        return with_partition(part, self._rows.plan.ds, self._rows.plan.surface)


def _is_current(state: _State, run_id: str) -> bool:
    """Whether the partition holds what this run published, and all of it."""
    return (
        state.stamp is not None
        and state.stamp[f"{_STAMP}run_id"] == run_id
        and _rows(state.stamp) == state.rows
    )


def _rows(stamp: dict[str, Any]) -> int:
    return int(stamp[f"{_STAMP}rows"])


def _sql(text: str) -> str:
    """A text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"

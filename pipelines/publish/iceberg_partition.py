"""What one version of an Iceberg table says of a partition."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.expressions import And, BooleanExpression, EqualTo, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.snapshots import Operation, Snapshot, ancestors_of
from pyiceberg.typedef import Record

from pipelines.publish.iceberg_catalog import PROPERTIES
from pipelines.publish.lake_files import LiveFile, whole
from pipelines.publish.names import partition_name
from pipelines.storage import files
from schemas.runs import Published

_STAMP = "nightshelf."
_WITHDRAWN = 50  # runs that a partition remembers as withdrawn


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The partition in one snapshot of the table."""

    live: list[LiveFile]
    last: int | None  # the snapshot of the last publish that the table remembers
    empty_of: str | None  # the run without rows that is published, where one is

    @property
    def paths(self) -> frozenset[str]:
        """The live files."""
        return frozenset(file.path for file in self.live)


@dataclass(frozen=True, slots=True)
class IcebergPartition:
    """One date and surface of a table."""

    name: str  # of the table
    ds: str
    surface: str

    @property
    def where(self) -> BooleanExpression:
        """The partition's rows."""
        return And(_equals("ds", self.ds), _equals("surface", self.surface))

    def where_user(self, user_id: str | int | None) -> BooleanExpression:
        """The partition's rows, or those of one user."""
        return self.where if user_id is None else And(self.where, _equals("user_id", user_id))

    def stamp(self, run_id: str, rows: int) -> dict[str, str]:
        """What the snapshots of a publish say."""
        said = {"run_id": run_id, "ds": self.ds, "surface": self.surface, "rows": str(rows)}
        return {f"{_STAMP}{key}": value for key, value in said.items()}

    def live(self, tasks: Iterable[FileScanTask]) -> list[LiveFile]:
        """The files of a scan."""
        return [
            LiveFile(
                path=task.file.file_path,
                rows=task.file.record_count,
                bytes=task.file.file_size_in_bytes,
                deletes=bool(task.delete_files),
            )
            for task in tasks
        ]

    def state(self, table: Table) -> State:
        """The partition now."""
        live = self.live(table.scan(self.where).plan_files())
        last = next(self._stamps(table), None)
        run = None if last is None or live or stamped(last, "rows") else _run(last)
        return State(live=live, last=last.snapshot_id if last else None, empty_of=run or None)

    def is_published(self, table: Table) -> bool:
        """Whether a run is published, also one without rows."""
        state = self.state(table)
        return bool(state.live) or state.empty_of is not None

    def current(self, table: Table) -> Published | None:
        """What readers see."""
        state = self.state(table)
        if not state.live and state.empty_of is None:
            return None
        run_id = state.empty_of or self._run_of(table, state.live)
        stamp = next((s for s in self._stamps(table) if _run(s) == run_id), None)
        rows = sum(file.rows for file in state.live)
        return self._published(run_id, stamp, rows, tuple(sorted(state.paths)))

    def history(self, table: Table) -> list[Published]:
        """Publishes that the table remembers, the newest first."""
        return [
            self._published(_run(stamp), stamp, stamped(stamp, "rows"))
            for stamp in self._stamps(table)
            if _run(stamp) and stamp.summary and stamp.summary.operation is Operation.APPEND
        ]

    def dates(self, table: Table) -> Iterator[tuple[str, str]]:
        """Dates of the surface that have something published, and their runs; latest first."""
        found: dict[str, list[FileScanTask]] = {}
        specs = {i: [f.name for f in spec.fields] for i, spec in table.specs().items()}
        for task in table.scan(_equals("surface", self.surface)).plan_files():
            at = specs[task.file.spec_id].index("ds")
            found.setdefault(str(task.file.partition[at]), []).append(task)
        for ds in sorted(found.keys() | self._empties(table), reverse=True):
            other = IcebergPartition(self.name, ds, self.surface)
            live = other.live(found.get(ds, ()))
            run = other._run_of(table, live) if live else other.state(table).empty_of
            if run:
                yield ds, run

    def _empties(self, table: Table) -> set[str]:
        """Dates of the surface whose last publish had no rows."""
        last: dict[str, Snapshot] = {}
        for snapshot in ancestors_of(table.current_snapshot(), table.metadata):
            summary = snapshot.summary
            if summary and summary[f"{_STAMP}surface"] == self.surface:
                last.setdefault(summary[f"{_STAMP}ds"] or "", snapshot)
        return {ds for ds, stamp in last.items() if _run(stamp) and not stamped(stamp, "rows")}

    def withdrawn(self, table: Table) -> list[str]:
        """Runs that were taken back here."""
        found: list[str] = json.loads(table.properties.get(self._withdrawn_key, "[]"))
        return found

    def marks(self, table: Table, run_id: str, withdraw: str | None) -> dict[str, str]:
        """Properties of the table to set when `run_id` is published and `withdraw` taken back."""
        before = self.withdrawn(table)
        after = [run for run in before if run not in (run_id, withdraw)]
        after = [*after, *([withdraw] if withdraw else [])][-_WITHDRAWN:]
        return {} if after == before else {self._withdrawn_key: json.dumps(after)}

    @property
    def _withdrawn_key(self) -> str:
        return f"{_STAMP}withdrawn.{self.ds}/{self.surface}"

    def _stamps(self, table: Table) -> Iterator[Snapshot]:
        """Snapshots that publishes of this partition left, the newest first."""
        mine = (self.ds, self.surface)
        for snapshot in ancestors_of(table.current_snapshot(), table.metadata):
            summary = snapshot.summary
            if summary and (summary[f"{_STAMP}ds"], summary[f"{_STAMP}surface"]) == mine:
                yield snapshot

    def _run_of(self, table: Table, live: list[LiveFile]) -> str:
        """Whose rows readers see: the files say, or the rows where somebody else wrote them."""
        if (named := whole(live)) is not None:
            return named.run_id
        runs = table.scan(self.where, selected_fields=("run_id",)).to_arrow()["run_id"].unique()
        return ", ".join(sorted(str(run) for run in runs.to_pylist()))

    def _published(
        self, run_id: str, stamp: Snapshot | None, rows: int, paths: tuple[str, ...] = ()
    ) -> Published:
        at = "" if stamp is None else _when(stamp)
        return Published(
            table=self.name,
            partition=files.join(self.name, partition_name(self.ds, self.surface)),
            files=paths,
            rows=rows,
            run_id=run_id,
            format="iceberg",
            version="" if stamp is None else str(stamp.snapshot_id),
            published_at=at,
        )


def data_file(table: Table, path: str, data: bytes, ds: str, surface: str) -> DataFile:
    """The entry of a file in the table's manifests."""
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        metadata = file.metadata
    schema, spec = table.schema(), table.spec()
    # Whole values of what publishes look for, so that a delete never has to open a file.
    properties = {**table.properties, **{k: v for k, v in PROPERTIES.items() if ".metrics." in k}}
    statistics = data_file_statistics_from_parquet_metadata(
        parquet_metadata=metadata,
        stats_columns=compute_statistics_plan(schema, properties),
        parquet_column_mapping=parquet_path_to_id_mapping(schema),
    )
    values = {"ds": ds, "surface": surface}
    names = [schema.find_field(field.source_id).name for field in spec.fields]
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(*[values[name] for name in names]),
        file_size_in_bytes=len(data),
        sort_order_id=None,
        spec_id=spec.spec_id,
        equality_ids=None,
        key_metadata=None,
        **statistics.to_serialized_dict(),
    )


def stamped(snapshot: Snapshot, key: str) -> int:
    """A number that a publish left on a snapshot."""
    value = snapshot.summary[f"{_STAMP}{key}"] if snapshot.summary else None
    return int(value or 0)


def _run(snapshot: Snapshot) -> str:
    return (snapshot.summary[f"{_STAMP}run_id"] or "") if snapshot.summary else ""


def _when(snapshot: Snapshot) -> str:
    at = datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC)
    return at.isoformat(timespec="seconds")


def _equals(column: str, value: str | int) -> BooleanExpression:
    return EqualTo(term=Reference(column), value=literal(value))

"""What one version of a Delta table says of a partition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
from deltalake import DeltaTable, Transaction

from pipelines.publish.lake_files import LiveFile, whole
from pipelines.publish.names import partition_name
from pipelines.storage import files
from schemas.runs import Published

_STAMP = "nightshelf."
_COMMITS = (4, 64, None)  # of the log that are read at first, then, and at last: all


@dataclass(frozen=True, slots=True)
class DeltaPartition:
    """One date and surface of a table."""

    path: str
    ds: str
    surface: str

    def live(self, table: DeltaTable) -> list[LiveFile]:
        """The partition's data files."""
        return self._by_date(table, self.ds).get(self.ds, [])

    def _by_date(self, table: DeltaTable, ds: str | None = None) -> dict[str, list[LiveFile]]:
        """Data files of the surface, of one date or of each."""
        found: dict[str, list[LiveFile]] = {}
        adds = pa.table(table.get_add_actions(flatten=True))
        wanted = {"partition.surface": self.surface, **({"partition.ds": ds} if ds else {})}
        for name, value in wanted.items():
            if name not in adds.column_names:  # nothing was ever added
                return {}
            # Before there is an object for each: a table has the files of every night.
            adds = adds.filter(pc.equal(adds[name].cast(pa.string()), value))
        for row in adds.to_pylist():
            rows, size = row["num_records"] or 0, row["size_bytes"]
            file = LiveFile(path=row["path"], rows=rows, bytes=size)
            found.setdefault(str(row["partition.ds"]), []).append(file)
        return found

    def dates(self, table: DeltaTable) -> Iterator[tuple[str, str]]:
        """Dates of the surface that have something published, and their runs; latest first."""
        by_date = self._by_date(table)
        for ds in sorted(by_date, reverse=True):
            yield ds, self._run_of(table, by_date[ds], ds)

    def stamp(self, run_id: str, rows: int) -> dict[str, str]:
        """What the commit of a publish says."""
        said = {"run_id": run_id, "ds": self.ds, "surface": self.surface, "rows": str(rows)}
        return {f"{_STAMP}{key}": value for key, value in said.items()}

    def _stamps(self, table: DeltaTable) -> Iterator[dict[str, Any]]:
        """Commits that publishes of this partition left, the newest first."""
        seen = 0
        for limit in _COMMITS:  # each is a file of the log: a publish asks for its own, the last
            entries = table.history(limit)
            for entry in entries[seen:]:
                mine = (entry.get(f"{_STAMP}ds"), entry.get(f"{_STAMP}surface"))
                if mine == (self.ds, self.surface) and entry.get(f"{_STAMP}run_id"):
                    yield entry
            if limit is not None and len(entries) < limit:
                return
            seen = len(entries)

    def history(self, table: DeltaTable) -> list[Published]:
        """Publishes that the log still has, the newest first."""
        return [
            self._published(entry[f"{_STAMP}run_id"], entry, int(entry[f"{_STAMP}rows"]))
            for entry in self._stamps(table)
        ]

    def current(self, table: DeltaTable) -> Published | None:
        """What readers see."""
        live = self.live(table)
        if not live:
            return None
        run_id = self._run_of(table, live, self.ds)
        stamp = next((e for e in self._stamps(table) if e[f"{_STAMP}run_id"] == run_id), None)
        paths = tuple(sorted(file.path for file in live))
        return self._published(run_id, stamp, sum(file.rows for file in live), paths)

    def _published(
        self, run_id: str, stamp: dict[str, Any] | None, rows: int, paths: tuple[str, ...] = ()
    ) -> Published:
        version = at = ""
        if stamp is not None:
            version = str(stamp["version"])
            when = datetime.fromtimestamp(stamp["timestamp"] / 1000, UTC)
            at = when.isoformat(timespec="seconds")
        return Published(
            table=self.path,
            partition=files.join(self.path, partition_name(self.ds, self.surface)),
            files=paths,
            rows=rows,
            run_id=run_id,
            format="delta",
            version=version,
            published_at=at,
        )

    def _run_of(self, table: DeltaTable, live: list[LiveFile], ds: str) -> str:
        """Whose rows readers see: the files say, or the rows where somebody else wrote them."""
        if (named := whole(live)) is not None:
            return named.run_id
        mine = (pads.field("ds") == ds) & (pads.field("surface") == self.surface)
        runs = table.to_pyarrow_dataset().to_table(columns=["run_id"], filter=mine)
        return ", ".join(sorted(str(run) for run in runs["run_id"].unique().to_pylist()))

    def withdrawals(self, table: DeltaTable, run_id: str) -> int:
        """How often the run was withdrawn or let in again: odd while it is withdrawn."""
        return table.transaction_version(self._app_id(run_id)) or 0

    def marks(self, table: DeltaTable, run_id: str, withdraw: str | None) -> list[Transaction]:
        """Entries of the log, kept when it is cleaned, for a commit that publishes `run_id` and
        takes `withdraw` back.
        """
        found = []
        for run, out in ((run_id, False), (withdraw or "", True)):
            times = self.withdrawals(table, run) if run else 0
            if run and (times % 2 == 1) is not out:
                found.append(Transaction(self._app_id(run), times + 1))
        return found

    def _app_id(self, run_id: str) -> str:
        return f"{_STAMP}withdrawn/{self.ds}/{self.surface}/{run_id}"

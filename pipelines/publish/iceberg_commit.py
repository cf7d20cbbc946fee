"""A transaction on an Iceberg table whose cost does not follow from how many snapshots it has."""

from __future__ import annotations

from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import TableUpdate, update_table_metadata


class OneLook(Transaction):
    """A transaction that works out its metadata once after each change.

    pyiceberg's own does at every look, some 25 times in a publish, and copies every snapshot of the
    table each time. Nothing changes the metadata in its place: an update makes another one.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._seen: tuple[TableMetadata, tuple[TableUpdate, ...], TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        """The table's metadata with the changes so far."""
        base, updates = self._table.metadata, self._updates
        if not updates:
            return base
        if self._seen is None or self._seen[0] is not base or self._seen[1] is not updates:
            self._seen = (base, updates, update_table_metadata(base, updates))
        return self._seen[2]

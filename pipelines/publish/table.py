"""What a table format must do to hold published partitions. One implementation per format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa

from pipelines.publish.rows import RunRows
from schemas.runs import Published
from schemas.settings import RunConfig


class PublishedTable(Protocol):
    """One partition (ds, surface) of a table."""

    def check(self, config: RunConfig) -> None:
        """Raise `ConfigError` for what would stop a publish, before the run. Creates no table."""

    def current(self) -> Published | None:
        """What readers see now; None when nothing was ever published."""

    def history(self) -> list[Published]:
        """What was published, the newest first, as far as the table remembers."""

    def replace(self, rows: RunRows) -> Published:
        """Make these rows the partition's only ones, in one step for readers.

        Does nothing when the run is what readers see now, whole.

        Raises:
            ConflictError: somebody else changed the partition meanwhile; their rows stand.
            StorageError: the table could not be read or written; its rows are as they were.
        """

    def restore(self, old: Published) -> Published:
        """Make rows current again that the table still holds.

        Raises:
            ConflictError: somebody else changed the partition meanwhile.
            StorageError: the table holds them no more.
        """

    def read(
        self,
        columns: list[str] | None = None,
        *,
        user_id: str | int | None = None,
        shard: int | None = None,
    ) -> pa.Table:
        """The current rows, or one user's; `shard` says where that user is, if it is known.

        Raises:
            StorageError: nothing is published.
        """

    def parts(self) -> Iterator[pa.Table]:
        """The current rows a part at a time, in no order; a user's rows may be in several.

        Raises:
            StorageError: nothing is published.
            ConflictError: the partition was replaced while it was read.
        """

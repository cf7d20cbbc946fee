"""What a table format must do to hold published partitions. One implementation per format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa

from pipelines.publish.rows import Rows
from schemas.runs import Published


class PublishedTable(Protocol):
    """One partition (ds, surface) of a table, and the one record of what is published there."""

    def check(self, schema: pa.Schema) -> None:
        """Raise `ConfigError` for what would stop a publish of rows with these columns, before the
        run. Creates no table.
        """

    def current(self) -> Published | None:
        """What readers see now; None when nothing is published."""

    def history(self) -> list[Published]:
        """What was published, the newest first, as far as the table remembers."""

    def dates(self) -> Iterator[tuple[str, str]]:
        """Every date of the surface that has something published, and its run; latest first."""

    def is_withdrawn(self, run_id: str) -> bool:
        """Whether this run was taken back here, so that only a person publishes it again."""

    def replace(self, rows: Rows, *, withdraw: str | None = None) -> Published:
        """Make these rows the partition's only ones, in one step for readers. The run is not, or no
        longer, withdrawn; the run `withdraw` is.

        Does nothing when the run is what readers see now, whole and undamaged.

        Raises:
            ConfigError: the table cannot hold them.
            ConflictError: somebody else changed the partition meanwhile; their rows stand.
            StorageError: the table could not be read or written; its rows are as they were.
        """

    def restore(self, old: Published, *, withdraw: str | None = None) -> Published:
        """Make rows current again that the table still holds, undamaged. `withdraw`: as above.

        Raises:
            ConflictError: somebody else changed the partition meanwhile.
            StorageError: the table holds them no more.
        """

    def clear(self, *, withdraw: str | None = None) -> None:
        """Make the partition one that nothing is published in. `withdraw`: as above.

        Raises: as `restore`.
        """

    def verify(self) -> int:
        """Compare every file that readers see with the hash it was published with; how many.

        Raises:
            StorageError: nothing is published, or what readers see is not what a run published.
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
            StorageError: nothing is published, or a file is not what was published.
            ConflictError: the partition was replaced while it was read.
        """

"""That no user stands in two files of the users table, which `inputs.self_contained` promises.

A user's rows must come from one shard, or its list would be published twice.
"""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from pipelines.sources import input_files
from pipelines.sources.frames import reading
from pipelines.sources.input_columns import Piece, Wanted, scan_columns
from schemas.errors import TableError, quoted
from schemas.runs import InputTable

_USERS_AT_ONCE = 5_000_000  # ids held at once
_FILE = "__file"


def check_users_once(table: InputTable) -> None:
    """Refuse a user that stands in two files.

    Where the files' statistics say that their users do not overlap (a table sorted by user), no row
    is read. Else the ids are read, in as many passes as keep memory bounded.

    Raises:
        TableError: a user stands in two files.
    """
    if _apart([file.path for file in table.files]):
        return
    with reading("users", [file.path for file in table.files]):
        _look_in_all(table)


def _look_in_all(table: InputTable) -> None:
    wanted = [Wanted("user_id", "user_id", pa.string())]
    pieces = [Piece(file.path, 0) for file in table.files]
    passes = -(-table.rows // _USERS_AT_ONCE)
    for part in range(passes):
        ids = scan_columns("users", pieces, wanted, paths=_FILE).drop_nulls()
        mine = ids.filter(pl.col("user_id").hash(seed=0) % passes == part)
        by_user = mine.group_by("user_id")
        places = by_user.agg(pl.col(_FILE).min().alias("one"), pl.col(_FILE).max().alias("other"))
        twice = places.filter(pl.col("one") != pl.col("other")).collect(engine="streaming")
        if not twice.is_empty():
            user, one, other = twice.sort("user_id").row(0)
            raise TableError(
                "users: a user stands in two files, which inputs.self_contained does not allow",
                expected="all rows of a user in one file",
                got=f"user_id {quoted(user)}, and {len(twice) - 1} more",
                where=f"{one} and {other}",
                do="Write the table with all of a user in one file, or leave "
                "inputs.self_contained out: the run then sorts users into shards itself.",
            )


def _apart(paths: list[str]) -> bool:
    """Whether the statistics of `user_id` prove that no two files share a user."""
    ranges = [input_files.column_range(path, "user_id") for path in paths]
    known = sorted(found for found in ranges if found is not None)
    if len(known) < len(paths):
        return False
    return all(one[1] < other[0] for one, other in zip(known, known[1:], strict=False))

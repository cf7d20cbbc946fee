"""The rows of a shard: a file that prepare wrote, or a file of the users table as it is."""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from pipelines.inputs.prepared import read_prepared
from pipelines.inputs.shard_columns import (
    ROW,
    contract,
    mark_duplicates,
    schema_of,
    shape_of_candidates,
    to_arrow,
    users_columns,
    wanted_columns,
)
from pipelines.sources import input_files
from pipelines.sources.input_columns import Piece, Wanted, read_columns, scan_columns
from schemas.errors import ChangedError, MissingFileError
from schemas.runs import RunPlan, Shard
from schemas.tables import (
    CANDIDATE_LIST,
    DUPLICATE,
    EXCLUDED_LIST,
    FILE,
    ID_TYPES,
    USER_CANDIDATES,
    USER_EXCLUSIONS,
)


def read_shard_table(plan: RunPlan, shard: Shard, only: list[str] | None = None) -> pa.Table:
    """A shard's users, sorted by id, with the columns that `prepare` gives a shard, or `only` some.

    Raises:
        StorageError: the file is missing or damaged.
        ChangedError: it is one of the users table, and not the one that was planned with.
    """
    if not plan.config.inputs.self_contained:
        return read_prepared(plan, shard.path, only)
    columns = users_columns(plan)
    item = pa.list_(ID_TYPES[plan.item_id_type])
    own = plan.config.task.uses_candidates and shape_of_candidates(plan) is None
    # A name that no file has gives nulls.
    sources = {CANDIDATE_LIST: USER_CANDIDATES if own else "", EXCLUDED_LIST: USER_EXCLUSIONS}
    schema = schema_of("users", [shard.path], contract(plan, "users"))
    wanted = wanted_columns(plan, columns, schema)
    wanted += [Wanted(name, source, item) for name, source in sources.items()]
    piece = Piece(shard.path, 0)
    users = scan_columns("users", [piece], wanted, numbers=ROW, paths=FILE).collect()
    check_as_planned(plan, shard)  # after it was read: no time is left to replace it
    users = mark_duplicates(users.with_columns(pl.col(*sources).list.drop_nulls()))
    # The lists of a row that is not used count for nothing, as when prepare joins them.
    users = users.with_columns(pl.when(~pl.col(DUPLICATE)).then(pl.col(CANDIDATE_LIST)))
    every = ["user_id", FILE, DUPLICATE, *columns, CANDIDATE_LIST, EXCLUDED_LIST]
    return to_arrow(users.select(only or every))


def read_users(plan: RunPlan, shard: Shard) -> pa.Array:
    """The ids of a shard's users, repeated and null ones included.

    Raises:
        StorageError: the file is missing or damaged.
        ChangedError: it is not the one that was planned with.
    """
    if plan.config.inputs.self_contained:
        wanted = [Wanted("user_id", "user_id", ID_TYPES[plan.user_id_type])]
        table = read_columns("users", shard.path, wanted)
        check_as_planned(plan, shard)
        return table.column("user_id").combine_chunks()
    table = read_prepared(plan, shard.path, ["user_id", FILE])
    return table.filter(table.column(FILE).is_valid()).column("user_id").combine_chunks()


def check_as_planned(plan: RunPlan, shard: Shard) -> None:
    """Raise `ChangedError` when a file of a self-contained table is not the one that was planned
    with: no copy was made of it, so a file that is replaced is another input.
    """
    try:
        found = input_files.file_version(shard.path)
    except MissingFileError:
        found = "it is gone"
    if found != plan.inputs["users"].files[shard.index].version:
        raise ChangedError(
            "a file of the users table has changed since the run was planned",
            where=shard.path,
            do="A run reads them as they are: run again, which plans another run, or put the file "
            "back.",
        )

"""Tables beside a run, cut by its shards: read once, and then one shard at a time.

The parts lie in a temporary folder while they are needed, so that a table may be larger than
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa

from pipelines.inputs.prepare import SHARD, shard_column
from pipelines.inputs.prepared import shards_of
from pipelines.inputs.shard_columns import schema_of
from pipelines.inputs.shard_table import check_as_planned, read_users
from pipelines.sources import input_files
from pipelines.sources.frames import reading
from pipelines.sources.input_columns import Piece, Wanted, scan_columns
from pipelines.storage import files
from schemas.column_types import ID, SCALAR, is_empty
from schemas.errors import ConfigError, TableError, did_you_mean
from schemas.runs import RunPlan, ShardReceipt
from schemas.tables import ID_TYPES, Column, IdType, TableContract, id_type

_ROW = "__row"


class ByShard:
    """A table with a `user_id`, in one part per shard of a run.

    A user that the run does not have is in some shard of it.
    """

    def __init__(
        self, frame: pl.LazyFrame, plan: RunPlan, folder: Path, table: str, paths: Sequence[str]
    ) -> None:
        """Cut `frame`, which is read from `paths` and called `table`.

        Raises:
            TableError: rows of a file cannot be read.
        """
        self._folder, self._schema = folder, frame.collect_schema()
        folder.mkdir(parents=True)
        numbered = _in_shards(frame.with_row_index(_ROW), plan)
        target = pl.PartitionBy(str(folder), key=SHARD, include_key=False)
        with reading(table, paths):
            numbered.sink_parquet(
                target,
                mkdir=True,
                compression="lz4",
                engine="streaming",
                row_group_size=max(64, 1_600_000 // plan.num_shards),
            )

    def shard(self, index: int) -> pl.DataFrame:
        """The rows of one shard, in the order they came in."""
        found = sorted((self._folder / f"{SHARD}={index}").glob("*.parquet"))
        if not found:
            return pl.DataFrame(schema=self._schema)
        rows = pl.read_parquet(found, hive_partitioning=False, glob=False)
        return rows.sort(_ROW).drop(_ROW)


def _in_shards(frame: pl.LazyFrame, plan: RunPlan) -> pl.LazyFrame:
    if not plan.config.inputs.self_contained:
        return frame.with_columns(shard_column(plan.num_shards))
    wanted = [Wanted("user_id", "user_id", ID_TYPES[plan.user_id_type])]
    shards = []
    for shard in shards_of(plan):
        check_as_planned(plan, shard)  # the rows of a shard are those of the file as it was
        users = scan_columns("users", [Piece(shard.path, 0)], wanted)
        here = pl.lit(shard.index, dtype=pl.Int32).alias(SHARD)
        shards.append(users.with_columns(here))
    places = pl.concat(shards).unique("user_id")
    return frame.join(places, on="user_id", how="left").with_columns(pl.col(SHARD).fill_null(0))


def same_id_type(table: str, column: str, got: IdType, want: IdType, where: str) -> None:
    """Raise `TableError` when ids could not be compared with the run's."""
    if got != want:
        raise TableError(
            f"{table}: {column} has another type than the run's",
            expected=str(ID_TYPES[want]),
            got=str(ID_TYPES[got]),
            where=where,
            do=f"Cast it: 7 and '007' would never meet. The run's ids are {ID_TYPES[want]}.",
        )


class Segments:
    """A users column, by shard: the segment of each user."""

    def __init__(
        self,
        plan: RunPlan,
        column: str,
        path: str | None,
        folder: Path,
        shards_of_run: RunPlan | None = None,
    ) -> None:
        """Read it from the run's own users table, or from another at `path`; cut it by the shards
        of the run, or of another.

        Raises:
            ConfigError: there is no such column.
            TableError: a file is gone, or its ids are of another type.
        """
        named = None if path is None else input_files.list_parquet(path, "users")
        paths = named or [file.path for file in plan.inputs["users"].files]
        for one in paths:
            _, schema = input_files.describe_file(one, "users")
            for name in ("user_id", column):
                if name not in schema.names:
                    raise ConfigError(
                        f"--by: the users table has no column {name!r}",
                        got=", ".join(schema.names) + did_you_mean(name, schema.names),
                        where=one,
                        do="Name another column, or another table with --users.",
                    )
            kind = id_type(schema.field("user_id").type)
            if not is_empty(schema.field("user_id").type):
                same_id_type("users", "user_id", kind, plan.user_id_type, one)
        asked = {"user_id": Column("user_id", ID), column: Column(column, SCALAR)}
        schema_of("users", paths, TableContract("users", (*asked.values(),)))
        # One name each, so that a column may be user_id itself.
        wanted = [
            Wanted("user_id", "user_id", ID_TYPES[plan.user_id_type]),
            Wanted("__segment", column, pa.string()),
        ]
        pieces = [Piece(one, 0) for one in paths]
        frame = scan_columns("users", pieces, wanted).drop_nulls("user_id")
        self._parts = ByShard(frame, shards_of_run or plan, folder, "users", paths)

    def of(self, index: int, users: pl.Series) -> pl.Series:
        """The segment of each of these users of a shard; null where it is not known."""
        first = self._parts.shard(index).unique("user_id", keep="first", maintain_order=True)
        return users.to_frame("user_id").join(
            first, on="user_id", how="left", maintain_order="left"
        )["__segment"]


def staged_rows(plan: RunPlan, receipt: ShardReceipt, depth: int) -> pl.DataFrame:
    """Each user's first `depth` rows of a shard: `user_id, rank, item_id, score`."""
    path = files.join(plan.run_dir, receipt.result.path)
    columns = ["user_id", "rank", "item_id", "score"]
    frame = pl.from_arrow(files.read_parquet(path, columns))
    assert isinstance(frame, pl.DataFrame), "a table is a frame"
    return frame.filter(pl.col("rank") <= depth)


def shard_users(plan: RunPlan, index: int) -> pl.Series:
    """The users of a shard, each once, whatever became of them."""
    users = pl.from_arrow(read_users(plan, shards_of(plan)[index]))
    assert isinstance(users, pl.Series), "an array is a series"
    return users.drop_nulls().unique()


def depths(plan: RunPlan, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """The cut-offs k that a run's lists allow, ascending; by default those of 1, 5, 10 and 20.

    Raises:
        ConfigError: the run recommends nothing, or one of `wanted` is longer than its lists.
    """
    if not plan.config.task.gives_lists:
        raise ConfigError(
            "the run has no lists",
            got=f"task.{plan.config.task.asked[0]}",
            where=plan.run_dir,
            do="Choose another run.",
        )
    most = plan.config.task.k
    if wanted is None:
        return tuple(k for k in (1, 5, 10, 20) if k < most) + ((most,) if most <= 20 else (20,))
    if wrong := [k for k in wanted if not 1 <= k <= most]:
        raise ConfigError(
            f"--k {wrong[0]} cannot be measured",
            expected=f"1 to {most}: the run's lists have task.k = {most} items",
            where=plan.run_dir,
        )
    return tuple(sorted(set(wanted)))

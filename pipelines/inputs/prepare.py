"""Prepare: join users, candidates and exclusions into self-contained shard files.

A user's shard is `xxh64(utf8(user_id), seed=42) mod n`, with the hash read as a signed integer and
a non-negative remainder: what Spark's `pmod(xxhash64(user_id), n)` gives. Each input table is
streamed once and split by shard; then the shards are joined one at a time, so that memory is
bounded by a shard and never by the input. Rows of a shard are sorted by `user_id`.

Two shapes of candidates are not per user: a set per segment, and one set shared by all. They are
written once, beside the shards, and joined when a shard is read.

With `inputs.self_contained` the files of the users table are the shards, and nothing is joined.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from pipelines.catalog.build import is_saved
from pipelines.catalog.items import catalog_dir, read_items
from pipelines.inputs.prepared import candidate_sets_path, is_prepared, mark_prepared, shards_of
from pipelines.inputs.shard_columns import (
    ROW,
    first_row,
    id_dtype,
    mark_duplicates,
    shape_of_candidates,
    table_schema,
    to_arrow,
    users_columns,
    wanted_columns,
)
from pipelines.inputs.unchanged import check_inputs
from pipelines.inputs.users_once import check_users_once
from pipelines.sources.frames import reading
from pipelines.sources.input_columns import Piece, Wanted, read_columns, scan_columns
from pipelines.storage import files
from pipelines.storage.files import Written
from pipelines.storage.storage_errors import translated
from schemas.runs import RunPlan, Shard
from schemas.tables import (
    CANDIDATE_LIST,
    DUPLICATE,
    EXCLUDED_LIST,
    FILE,
    ID_TYPES,
    CandidateShape,
)

SHARD_SEED = 42
SHARD = "__shard"  # where a row of a table goes
_FILE = "__file"


def shard_of(user_ids: list[str | None], num_shards: int) -> NDArray[np.int32]:
    """The shard of each user id (as text); a null id goes where the empty text goes."""
    texts = ((user or "").encode() for user in user_ids)
    hashes = np.fromiter(
        (xxhash.xxh64_intdigest(text, seed=SHARD_SEED) for text in texts), dtype=np.uint64
    )
    return np.mod(hashes.view(np.int64), num_shards).astype(np.int32)


def prepare_run(plan: RunPlan) -> list[Shard]:
    """Write the catalog, the candidate sets and the shard files; what is already there is kept.

    Raises:
        CatalogError: an item or its semantic ID cannot be used.
        TableError: with `inputs.self_contained`, a user stands in two files.
    """
    prepare_items(plan)
    shards = shards_of(plan)
    if is_prepared(plan):
        return shards
    written = prepare_candidate_sets(plan)
    if plan.config.inputs.self_contained:
        check_users_once(plan.inputs["users"])
    else:
        written |= _write_shards(plan, shards)
    mark_prepared(plan, written)
    return shards


def _write_shards(plan: RunPlan, shards: list[Shard]) -> dict[str, Written]:
    with spill_folder(plan) as spill:
        for name, columns in tables_to_split(plan).items():
            with reading(name, [file.path for file in plan.inputs[name].files]):
                _split(plan, name, columns, spill)
            check_inputs(plan, name)
        return {
            shard.path: write_shard(plan, shard, partial(_spilled, spill, shard))
            for shard in shards
        }


def prepare_items(plan: RunPlan) -> None:
    """Write the catalog, unless it is there already."""
    if "catalog" in plan.inputs and not is_saved(catalog_dir(plan)):
        paths = [file.path for file in plan.inputs["catalog"].files]
        catalog = read_items(plan.config, paths)
        check_inputs(plan, "catalog")
        catalog.save(catalog_dir(plan))


def prepare_candidate_sets(plan: RunPlan) -> dict[str, Written]:
    """Write the candidate sets that are not per user, where there are such; what was written, by
    path.
    """
    shape = shape_of_candidates(plan)
    if shape in ("segment", "shared"):
        with reading("candidates", [file.path for file in plan.inputs["candidates"].files]):
            written = _write_candidate_sets(plan, shape)
        check_inputs(plan, "candidates")
        return {candidate_sets_path(plan): written}
    return {}


def tables_to_split(plan: RunPlan) -> dict[str, dict[str, str]]:
    """The tables whose rows go to the shard of their user: columns to keep, what each holds."""
    tables = {"users": users_columns(plan)}
    shape = shape_of_candidates(plan)
    if shape in ("long", "wide"):
        tables["candidates"] = {"item_id" if shape == "long" else "item_ids": "item"}
    if "exclusions" in plan.inputs:
        tables["exclusions"] = {"item_id": "item"}
    return tables


def write_shard(
    plan: RunPlan, shard: Shard, rows_of: Callable[[str], pl.DataFrame | None]
) -> Written:
    """Join and write one shard. `rows_of` a table gives the shard's rows as `split_frame` selects
    them, with their row numbers; None where it has none.
    """
    table = _join_shard(plan, shape_of_candidates(plan), rows_of)
    return files.write_table(shard.path, table, sorted_by="user_id")


@contextmanager
def spill_folder(plan: RunPlan) -> Iterator[Path]:
    """A folder of this machine for what is split, empty; it goes with the block."""
    local = files.local_path(files.join(plan.run_dir, "spill"))
    if local is None:
        with TemporaryDirectory(prefix="nightshelf-spill-") as folder:
            yield Path(folder)
        return
    shutil.rmtree(local, ignore_errors=True)
    try:
        yield Path(local)
    finally:  # a full disk needs it most
        shutil.rmtree(local, ignore_errors=True)


def split_frame(
    plan: RunPlan, name: str, columns: dict[str, str], schema: pa.Schema, pieces: Sequence[Piece]
) -> pl.LazyFrame:
    """Pieces of one table as a shard has them, with their numbers, files and shards. `schema` is
    that of the whole table: a part of it may hold nulls only.
    """
    wanted = wanted_columns(plan, columns, schema)
    frame = scan_columns(name, pieces, wanted, numbers=ROW, paths=_FILE)
    return frame.with_columns(shard_column(plan.num_shards))


def shard_column(num_shards: int) -> pl.Expr:
    """The shard of each row, as column `__shard`."""

    def assign(ids: pl.Series) -> pl.Series:
        return pl.Series(shard_of(ids.to_list(), num_shards))

    return (
        pl.col("user_id")
        .cast(pl.String)
        .map_batches(assign, return_dtype=pl.Int32, is_elementwise=True)
        .alias(SHARD)
    )


def _split(plan: RunPlan, name: str, columns: dict[str, str], spill: Path) -> None:
    """Stream one table, file after file, into one folder per shard."""
    paths = [file.path for file in plan.inputs[name].files]
    pieces = [Piece(path, first_row(place)) for place, path in enumerate(paths)]
    frame = split_frame(plan, name, columns, table_schema(plan, name), pieces)
    target = pl.PartitionBy(str(spill / name), key=SHARD, include_key=False)
    # One row group per shard is open while the table streams: the more shards, the smaller the
    # groups, so that memory stays flat. Rows with lists are large; those of a long table are not.
    listed = any(isinstance(dtype, pl.List) for dtype in frame.collect_schema().dtypes())
    with translated(str(spill), done="written", what="a folder of temporary files"):
        frame.sink_parquet(
            target,
            mkdir=True,
            compression="lz4",
            engine="streaming",
            row_group_size=max(64, (50_000 if listed else 1_600_000) // plan.num_shards),
        )


def _spilled(spill: Path, shard: Shard, name: str) -> pl.DataFrame | None:
    folder = spill / name / f"{SHARD}={shard.index}"
    found = sorted(folder.glob("*.parquet")) if folder.exists() else []
    if not found:
        return None
    with translated(str(folder), what="a temporary file"):
        return pl.read_parquet(found, hive_partitioning=False, glob=False)


def _join_shard(
    plan: RunPlan, shape: CandidateShape | None, rows_of: Callable[[str], pl.DataFrame | None]
) -> pa.Table:
    """One shard: users sorted by id, each with its candidates and exclusions.

    A user that stands twice keeps both rows, the later one marked and without lists. Candidates of
    users that are not in the users table come as rows without a file.
    """
    item = id_dtype(plan.item_id_type)
    columns = users_columns(plan)
    users = rows_of("users")
    if users is None:
        empty = pa.schema([(w.name, w.dtype) for w in wanted_columns(plan, columns, pa.schema([]))])
        users = pl.DataFrame(pl.from_arrow(empty.empty_table())).with_columns(
            pl.lit(0, dtype=pl.Int64).alias(ROW), pl.lit("").alias(_FILE)
        )
    users = mark_duplicates(users.rename({_FILE: FILE}))
    candidates = _lists(rows_of("candidates"), shape)
    if candidates is not None:
        users = users.with_columns(pl.col(DUPLICATE).not_().alias("__first"))
        candidates = candidates.with_columns(pl.lit(value=True).alias("__first"))
        users = users.join(
            candidates, on=["user_id", "__first"], how="full", coalesce=True, nulls_equal=False
        )
        users = users.with_columns(pl.col(DUPLICATE).fill_null(value=False)).drop("__first")
    else:
        users = users.with_columns(pl.lit(None, dtype=pl.List(item)).alias(CANDIDATE_LIST))
    excluded = _lists(rows_of("exclusions"), "long")
    if excluded is not None:
        users = users.join(
            excluded.rename({CANDIDATE_LIST: EXCLUDED_LIST}), on="user_id", how="left"
        )
    else:
        users = users.with_columns(pl.lit(None, dtype=pl.List(item)).alias(EXCLUDED_LIST))
    users = users.sort("user_id", ROW, nulls_last=True).drop(ROW)
    return to_arrow(
        users.select("user_id", FILE, DUPLICATE, *columns, CANDIDATE_LIST, EXCLUDED_LIST)
    )


def _lists(frame: pl.DataFrame | None, shape: CandidateShape | None) -> pl.DataFrame | None:
    """(user_id, candidates): one list per user, in input order, repeated rows joined."""
    if frame is None:
        return None
    column = "item_ids" if shape == "wide" else "item_id"
    frame = frame.sort(ROW)
    if shape == "wide":
        frame = frame.explode(column, empty_as_null=False, keep_nulls=False)
    return frame.group_by("user_id", maintain_order=True).agg(pl.col(column).alias(CANDIDATE_LIST))


def _write_candidate_sets(plan: RunPlan, shape: CandidateShape) -> Written:
    """(segment, candidates) of sets that are not per user; the shared set has a null segment."""
    item = ID_TYPES[plan.item_id_type]
    wanted = [Wanted("item", "item_id", item)]
    if shape == "segment":  # which is written as that of users is
        wanted = [
            Wanted("segment", "segment", pa.string()),
            Wanted("item", "item_ids", pa.list_(item)),
        ]
    parts = []
    for file in plan.inputs["candidates"].files:
        table = read_columns("candidates", file.path, wanted)
        if shape == "shared":
            ids = table.column("item")
            parts.append(pa.table({"segment": pa.nulls(len(ids), pa.string()), "item": ids}))
        else:
            frame = pl.DataFrame(pl.from_arrow(table))
            frame = frame.drop_nulls("segment")  # a set of no segment is nobody's
            flat = to_arrow(frame.explode("item", empty_as_null=False, keep_nulls=False))
            parts.append(flat)
    return files.write_table(candidate_sets_path(plan), pa.concat_tables(parts))

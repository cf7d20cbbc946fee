"""Prepare: join users, candidates and exclusions into self-contained shard files.

A user's shard is `xxh64(utf8(user_id), seed=42) mod n`, with the hash read as a signed integer and
a non-negative remainder: what Spark's `pmod(xxhash64(user_id), n)` gives. Each input table is
streamed once and split by shard; then the shards are joined one at a time, so that memory is
bounded by a shard and never by the input. Rows of a shard are sorted by `user_id`.

Two shapes of candidates are not per user: a set per segment, and one set shared by all. They are
written once, beside the shards, and joined when a shard is read.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from pipelines import files
from pipelines.catalog import is_saved
from pipelines.items import catalog_dir, read_items
from schemas.eligibility import user_columns
from schemas.runs import RunPlan, Shard
from schemas.tables import (
    CANDIDATE_LIST,
    DUPLICATE,
    ELIGIBILITY,
    EXCLUDED_LIST,
    FILE,
    ID_TYPES,
    K_COLUMN,
    LABELS_COLUMN,
    CandidateShape,
    candidate_shape,
    users_contract,
)

SHARD_SEED = 42
_ROW, _SHARD, _FILE = "__row", "__shard", "__file"


def shard_of(user_ids: list[str | None], num_shards: int) -> NDArray[np.int32]:
    """The shard of each user id (as text); a null id goes where the empty text goes."""
    texts = ((user or "").encode() for user in user_ids)
    hashes = np.fromiter(
        (xxhash.xxh64_intdigest(text, seed=SHARD_SEED) for text in texts), dtype=np.uint64
    )
    return np.mod(hashes.view(np.int64), num_shards).astype(np.int32)


def candidate_sets_path(plan: RunPlan) -> str:
    """Where candidate sets that are not per user are."""
    return files.join(plan.run_dir, "candidate_sets.parquet")


def shards_of(plan: RunPlan) -> list[Shard]:
    """The shards of a run, in order."""
    return [
        Shard(index=i, path=files.join(plan.run_dir, "shards", f"shard-{i:05d}.parquet"))
        for i in range(plan.num_shards)
    ]


def is_prepared(plan: RunPlan) -> bool:
    """Whether the run's shards are all there."""
    there = set(files.list_names(files.join(plan.run_dir, "shards")))
    return {"_done", *(shard.path.rpartition("/")[2] for shard in shards_of(plan))} <= there


def prepare_run(plan: RunPlan) -> list[Shard]:
    """Write the catalog, the candidate sets and the shard files; what is already there is kept.

    Raises:
        CatalogError: an item or its semantic ID cannot be used.
    """
    if "catalog" in plan.inputs and not is_saved(catalog_dir(plan)):
        paths = [file.path for file in plan.inputs["catalog"].files]
        read_items(plan.config, paths).save(catalog_dir(plan))
    shards = shards_of(plan)
    if is_prepared(plan):
        return shards
    spill = Path(files.join(plan.run_dir, "spill"))
    shutil.rmtree(spill, ignore_errors=True)
    shape = _candidate_shape(plan)
    _split(plan, "users", _users_columns(plan), spill)
    if shape in ("long", "wide"):
        _split(plan, "candidates", {"item_id" if shape == "long" else "item_ids": "item"}, spill)
    elif shape is not None:
        _write_candidate_sets(plan, shape)
    if "exclusions" in plan.inputs:
        _split(plan, "exclusions", {"item_id": "item"}, spill)
    for shard in shards:
        files.write_parquet(shard.path, _join_shard(plan, shape, spill, shard), sorted_by="user_id")
    files.write_bytes(files.join(plan.run_dir, "shards", "_done"), b"")
    shutil.rmtree(spill, ignore_errors=True)
    return shards


def _candidate_shape(plan: RunPlan) -> CandidateShape | None:
    table = plan.inputs.get("candidates")
    if table is None:
        return None
    _, schema = files.describe_file(table.files[0].path, "candidates")
    return candidate_shape(schema, table.files[0].path)


def _users_columns(plan: RunPlan) -> dict[str, str]:
    """Columns to keep of the users table and what each holds."""
    template = plan.config.prompt.parsed
    kinds = {"user_id": "user", "embedding": "plain", "history": "item", "user_sid": "plain"}
    contract = users_contract(template, by_segment=_candidate_shape(plan) == "segment")
    names = [column.name for column in contract.columns]
    out = {name: kinds.get(name, "text") for name in names if name != "user_id"}
    if plan.config.task.k_column is not None:
        out[K_COLUMN] = "k"
    if plan.config.task.label is not None and plan.config.task.label.labels_column is not None:
        out[LABELS_COLUMN] = "as it is"
    rule = plan.config.task.eligible
    if rule is not None:  # beside a text copy the prompt may want: these keep their type
        out |= {ELIGIBILITY + name: "as it is" for name in user_columns(rule)}
    return out


def _id_dtype(kind: str) -> pl.DataType:
    return pl.String() if kind == "string" else pl.Int64()


def _split(plan: RunPlan, name: str, columns: dict[str, str], spill: Path) -> None:
    """Stream one table, file after file, into one folder per shard.

    Every file is cast by its own schema before files are joined: the first file's types decide
    nothing.
    """
    frames = [
        _typed(plan, _scan(file.path), columns).with_columns(pl.lit(file.path).alias(_FILE))
        for file in plan.inputs[name].files
    ]
    num_shards = plan.num_shards

    def assign(ids: pl.Series) -> pl.Series:
        return pl.Series(shard_of(ids.to_list(), num_shards))

    shard = (
        pl.col("user_id")
        .cast(pl.String)
        .map_batches(assign, return_dtype=pl.Int32, is_elementwise=True)
    )
    frame = (
        pl.concat(frames, how="vertical_relaxed")
        .with_row_index(_ROW)
        .with_columns(shard.alias(_SHARD))
    )
    target = pl.PartitionBy(str(spill / name), key=_SHARD, include_key=False)
    # One row group per shard is open while the table streams: the more shards, the smaller the
    # groups, so that memory stays flat. Rows with lists are large; those of a long table are not.
    listed = any(isinstance(dtype, pl.List) for dtype in frame.collect_schema().dtypes())
    frame.sink_parquet(
        target,
        mkdir=True,
        compression="lz4",
        engine="streaming",
        row_group_size=max(64, (50_000 if listed else 1_600_000) // num_shards),
    )


def _scan(path: str) -> pl.LazyFrame:
    return pl.scan_parquet(path, glob=False, hive_partitioning=False)


def _typed(plan: RunPlan, frame: pl.LazyFrame, columns: dict[str, str]) -> pl.LazyFrame:
    """The columns of one file in the types a shard has."""
    schema = frame.collect_schema()
    chosen = [pl.col("user_id").cast(_id_dtype(plan.user_id_type))]
    for column, kind in columns.items():
        source = _source(plan, column)
        chosen.append(_column(column, source, kind, schema[source], plan.item_id_type))
    return frame.select(chosen)


def first_users(plan: RunPlan, paths: list[str], rows: int) -> pa.Table:
    """The first `rows` users of each of some files, as a shard without candidates holds them."""
    columns = _users_columns(plan)
    sources = ["user_id", *dict.fromkeys(_source(plan, column) for column in columns)]
    frames = []
    for path in paths:
        head = pl.from_arrow(files.read_head(path, rows, sources))
        assert isinstance(head, pl.DataFrame), "a table is a frame"
        typed = _typed(plan, head.lazy(), columns).collect()
        frames.append(typed.with_columns(pl.lit(path).alias(FILE)))
    users = pl.concat(frames, how="vertical_relaxed")
    again = pl.col("user_id").is_first_distinct().not_() & pl.col("user_id").is_not_null()
    return _to_arrow(plan, users.with_columns(again.alias(DUPLICATE)))


def _source(plan: RunPlan, name: str) -> str:
    """The users column behind a shard column."""
    if name == K_COLUMN:
        assert plan.config.task.k_column is not None, "a shard has a k only if it is configured"
        return plan.config.task.k_column
    if name == LABELS_COLUMN:
        label = plan.config.task.label
        assert label is not None, "a shard has labels only if they are asked for"
        assert label.labels_column is not None, "a shard has labels only if it is configured"
        return label.labels_column
    return name.removeprefix(ELIGIBILITY)


def _column(name: str, source: str, kind: str, found: pl.DataType, item_id_type: str) -> pl.Expr:
    """One input column in the type its shard column has."""
    column = pl.col(source)
    if isinstance(found, pl.Array):
        column = column.arr.to_list()
    dtype = _shard_dtype(name, kind, found, _id_dtype(item_id_type))
    return column.cast(dtype).alias(name)


def _spilled(spill: Path, name: str, shard: Shard) -> pl.DataFrame | None:
    folder = spill / name / f"{_SHARD}={shard.index}"
    found = sorted(folder.glob("*.parquet")) if folder.exists() else []
    if not found:
        return None
    return pl.read_parquet(found, hive_partitioning=False)


def _join_shard(plan: RunPlan, shape: CandidateShape | None, spill: Path, shard: Shard) -> pa.Table:
    """One shard: users sorted by id, each with its candidates and exclusions.

    A user that stands twice keeps both rows, the later one marked and without lists. Candidates of
    users that are not in the users table come as rows without a file.
    """
    item = _id_dtype(plan.item_id_type)
    columns = _users_columns(plan)
    users = _spilled(spill, "users", shard)
    if users is None:
        users = pl.DataFrame(
            schema={
                "user_id": _id_dtype(plan.user_id_type),
                _ROW: pl.get_index_type(),
                _FILE: pl.String(),
                **{n: _shard_dtype(n, kind, pl.List(item), item) for n, kind in columns.items()},
            }
        )
    users = users.sort("user_id", _ROW, nulls_last=True).with_columns(
        (pl.int_range(pl.len()).over("user_id") > 0).alias(DUPLICATE)
        & pl.col("user_id").is_not_null()
    )
    users = users.rename({_FILE: FILE})
    candidates = _lists(_spilled(spill, "candidates", shard), shape)
    if candidates is not None:
        users = users.with_columns(pl.col(DUPLICATE).not_().alias("__first"))
        candidates = candidates.with_columns(pl.lit(value=True).alias("__first"))
        users = users.join(
            candidates, on=["user_id", "__first"], how="full", coalesce=True, nulls_equal=False
        )
        users = users.with_columns(pl.col(DUPLICATE).fill_null(value=False)).drop("__first")
    else:
        users = users.with_columns(pl.lit(None, dtype=pl.List(item)).alias(CANDIDATE_LIST))
    excluded = _lists(_spilled(spill, "exclusions", shard), "long")
    if excluded is not None:
        users = users.join(
            excluded.rename({CANDIDATE_LIST: EXCLUDED_LIST}), on="user_id", how="left"
        )
    else:
        users = users.with_columns(pl.lit(None, dtype=pl.List(item)).alias(EXCLUDED_LIST))
    users = users.sort("user_id", _ROW, nulls_last=True).drop(_ROW)
    return _to_arrow(
        plan, users.select("user_id", FILE, DUPLICATE, *columns, CANDIDATE_LIST, EXCLUDED_LIST)
    )


def _shard_dtype(name: str, kind: str, found: pl.DataType, item: pl.DataType) -> pl.DataType:
    if kind == "item":
        return pl.List(item) if isinstance(found, (pl.List, pl.Array)) else item
    if kind == "text":
        return pl.String()
    if kind == "k":
        return pl.Int64()
    if kind == "as it is":
        if isinstance(found, (pl.Array, pl.List)):
            return pl.List(pl.String() if isinstance(found.inner, pl.Categorical) else found.inner)
        return pl.String() if isinstance(found, pl.Categorical) else found
    return pl.List(pl.Int64() if name == "user_sid" else pl.Float32())


def _lists(frame: pl.DataFrame | None, shape: CandidateShape | None) -> pl.DataFrame | None:
    """(user_id, candidates): one list per user, in input order, repeated rows joined."""
    if frame is None:
        return None
    column = "item_ids" if shape == "wide" else "item_id"
    frame = frame.sort(_ROW)
    if shape == "wide":
        frame = frame.explode(column, empty_as_null=False, keep_nulls=False)
    return frame.group_by("user_id", maintain_order=True).agg(pl.col(column).alias(CANDIDATE_LIST))


def _to_arrow(plan: RunPlan, users: pl.DataFrame) -> pa.Table:
    """Arrow with the plain types a shard file has: no large_string, no large_list."""
    table = users.to_arrow()
    fields = []
    for field in table.schema:
        dtype = field.type
        if pa.types.is_large_list(dtype) or pa.types.is_list(dtype):
            inner = dtype.value_type
            inner = pa.string() if pa.types.is_large_string(inner) else inner
            inner = pa.string() if pa.types.is_string_view(inner) else inner
            dtype = pa.list_(inner)
        elif pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype):
            dtype = pa.string()
        fields.append(pa.field(field.name, dtype))
    return table.cast(pa.schema(fields))


def _write_candidate_sets(plan: RunPlan, shape: CandidateShape) -> None:
    """(segment, candidates) of sets that are not per user; the shared set has a null segment."""
    item = ID_TYPES[plan.item_id_type]
    parts = []
    for file in plan.inputs["candidates"].files:
        table = files.read_parquet(file.path)
        if shape == "shared":
            ids = table.column("item_id").cast(item).combine_chunks()
            parts.append(pa.table({"segment": pa.nulls(len(ids), pa.string()), "item": ids}))
        else:
            frame = pl.from_arrow(table.select(["segment", "item_ids"]))
            assert isinstance(frame, pl.DataFrame), "two columns are a frame"
            frame = frame.drop_nulls("segment")  # a set of no segment is nobody's
            frame = frame.explode("item_ids", empty_as_null=False, keep_nulls=False)
            frame = frame.with_columns(pl.col("segment").cast(pl.String))  # as that of users is
            flat = frame.to_arrow()
            parts.append(
                pa.table(
                    {
                        "segment": flat.column("segment").cast(pa.string()),
                        "item": flat.column("item_ids").cast(item),
                    }
                )
            )
    files.write_parquet(candidate_sets_path(plan), pa.concat_tables(parts))

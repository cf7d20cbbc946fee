"""The columns of a shard: which ones a run reads of the users table, and the types they have.

Whoever brings rows into a shard (prepare here, or on Spark; a file that is its own shard) takes
them from here, so that a shard looks the same wherever it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl
import pyarrow as pa

from pipelines.sources import input_files
from pipelines.sources.input_columns import Piece, Wanted, scan_columns
from pipelines.sources.one_type import OneType
from schemas.column_types import (
    ATTRIBUTE,
    ID_LIST,
    INTEGER,
    LABELS,
    is_empty,
    is_list,
    plain,
    portable,
)
from schemas.eligibility import user_columns
from schemas.runs import RunPlan
from schemas.settings import RunConfig
from schemas.tables import (
    CANDIDATES,
    DUPLICATE,
    ELIGIBILITY,
    EXCLUSIONS,
    FILE,
    ID_TYPES,
    K_COLUMN,
    LABELS_COLUMN,
    USER_CANDIDATES,
    USER_EXCLUSIONS,
    CandidateShape,
    Column,
    IdType,
    TableContract,
    id_type,
    shape_of,
    users_contract,
)

ROW = "__row"  # place in the input; not in a shard
_FILE_BITS = 40  # rows of a file; a table may have more than the 2**32 that a row index can count


def first_row(file: int) -> int:
    """The number of the first row of a table's n-th file. Numbers grow, with gaps between files."""
    return file << _FILE_BITS


def shape_of_candidates(plan: RunPlan) -> CandidateShape | None:
    """The shape of the candidates table; None where there is none."""
    table = plan.inputs.get("candidates")
    return None if table is None else shape_of(table.columns)


def users_columns(plan: RunPlan) -> dict[str, str]:
    """Columns to keep of the users table, `user_id` besides, and what each holds."""
    template = plan.config.prompt.parsed
    kinds = {"user_id": "user", "embedding": "plain", "history": "item", "user_sid": "plain"}
    contract = users_contract(
        template,
        by_segment=shape_of_candidates(plan) == "segment",
        history=plan.config.reads_history,
    )
    names = [column.name for column in contract.columns]
    out = {name: kinds.get(name, "text") for name in names if name != "user_id"}
    if plan.config.task.k_column is not None:
        out[K_COLUMN] = "k"
    if plan.config.task.labels_column is not None:
        out[LABELS_COLUMN] = "labels"
    rule = plan.config.task.eligible
    if rule is not None:  # beside a text copy the prompt may want: these keep their type
        out |= {ELIGIBILITY + name: "as it is" for name in user_columns(rule)}
    return out


def id_dtype(kind: str) -> pl.DataType:
    """The polars type of ids of this kind."""
    return pl.String() if kind == "string" else pl.Int64()


def scan(path: str) -> pl.LazyFrame:
    """One Parquet file of a run or of its table, lazily, without columns from its path."""
    return pl.scan_parquet(path, glob=False, hive_partitioning=False)


def table_schema(plan: RunPlan, name: str) -> pa.Schema:
    """The columns that a run reads of one of its tables, with the types that the table has; reads
    the footer of every file.

    Raises:
        TableError: files differ.
    """
    return schema_of(name, [file.path for file in plan.inputs[name].files], contract(plan, name))


def schema_of(name: str, paths: Sequence[str], columns: TableContract) -> pa.Schema:
    """The columns of a contract in some files of a table; see `table_schema`."""
    types = OneType(name)
    for path in paths:
        _, schema = input_files.describe_file(path, name)
        columns.check(schema, path)
        for problem in types.problems(columns, schema, path):
            raise problem
    return types.schema()


def contract(plan: RunPlan, name: str) -> TableContract:
    """What a run reads of users, candidates or exclusions."""
    if name == "users":
        return contract_of_users(plan.config, by_segment=shape_of_candidates(plan) == "segment")
    if name == "candidates":
        shape = shape_of_candidates(plan)
        assert shape is not None, "there are candidates"
        return CANDIDATES[shape]
    return EXCLUSIONS


def contract_of_users(config: RunConfig, *, by_segment: bool) -> TableContract:
    """What the users table must hold for a run."""
    template, history = config.prompt.parsed, config.reads_history
    prompt = users_contract(template, by_segment=by_segment, history=history)
    read = {column.name for column in prompt.columns}
    more = [
        column
        for column in _besides_the_prompt(config)
        if column.kind is not ATTRIBUTE or column.name not in read
    ]
    return users_contract(template, by_segment=by_segment, history=history, more=more)


def _besides_the_prompt(config: RunConfig) -> Iterator[Column]:
    """Columns of users for the eligibility, k and labels; in a self-contained table, their
    candidates and exclusions as well.
    """
    task, inputs = config.task, config.inputs
    for name in user_columns(task.eligible) if task.eligible else ():
        yield Column(name, ATTRIBUTE)
    if task.k_column is not None:
        yield Column(task.k_column, INTEGER)
    if task.labels_column is not None:
        yield Column(task.labels_column, LABELS)
    if inputs.self_contained and task.uses_candidates and inputs.candidates is None:
        yield Column(USER_CANDIDATES, ID_LIST)
    if inputs.self_contained and config.needs_items:
        yield Column(USER_EXCLUSIONS, ID_LIST, required=False, in_all_or_none=True)


def wanted_columns(plan: RunPlan, columns: dict[str, str], schema: pa.Schema) -> list[Wanted]:
    """`user_id` and `columns` of an input table in the types that a shard has."""
    wanted = [Wanted("user_id", "user_id", ID_TYPES[plan.user_id_type])]
    for column, kind in columns.items():
        source = _source(plan, column)
        found = schema.field(source).type if source in schema.names else pa.null()
        wanted.append(Wanted(column, source, shard_type(column, kind, found, plan.item_id_type)))
    return wanted


def first_users(plan: RunPlan, paths: list[str], rows: int) -> pa.Table:
    """The first `rows` users of each of some files, as a shard without candidates holds them."""
    columns = users_columns(plan)
    schema = schema_of("users", paths, contract(plan, "users"))
    wanted = wanted_columns(plan, columns, schema)
    pieces = [Piece(path, 0, rows=rows) for path in paths]
    users = scan_columns("users", pieces, wanted, paths=FILE).collect()
    again = pl.col("user_id").is_first_distinct().not_() & pl.col("user_id").is_not_null()
    return to_arrow(users.with_columns(again.alias(DUPLICATE)))


def _source(plan: RunPlan, name: str) -> str:
    """The users column behind a shard column."""
    if name == K_COLUMN:
        assert plan.config.task.k_column is not None, "a shard has a k only if it is configured"
        return plan.config.task.k_column
    if name == LABELS_COLUMN:
        assert plan.config.task.labels_column is not None, "a shard has labels only if configured"
        return plan.config.task.labels_column
    return name.removeprefix(ELIGIBILITY)


def mark_duplicates(users: pl.DataFrame) -> pl.DataFrame:
    """Sorted by user, then input order; all but the first row of a user are marked."""
    return users.sort("user_id", ROW, nulls_last=True).with_columns(
        (pl.int_range(pl.len()).over("user_id") > 0).alias(DUPLICATE)
        & pl.col("user_id").is_not_null()
    )


def shard_type(name: str, kind: str, found: pa.DataType, item: IdType) -> pa.DataType:
    """The type of a shard column whose input column has the type `found`."""
    if kind == "item":
        return pa.list_(ID_TYPES[item]) if is_list(found) or name == "history" else ID_TYPES[item]
    if kind == "text":
        return pa.string()
    if kind == "k":
        return pa.int64()
    if kind == "labels":
        return pa.list_(ID_TYPES["string" if is_empty(found) else id_type(found)])
    if kind == "as it is":
        return portable(plain(found))
    return pa.list_(pa.int64() if name == "user_sid" else pa.float32())


def to_arrow(users: pl.DataFrame) -> pa.Table:
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

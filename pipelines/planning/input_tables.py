"""The tables that a run reads: listed, held to their contracts, and to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from engine.prompts.projector_spec import read_projector_spec
from pipelines.catalog.items import describe_items, items_contract, list_items
from pipelines.inputs.eligibility import check_types
from pipelines.inputs.segment_count import check_segment_count
from pipelines.inputs.shard_columns import contract_of_users
from pipelines.sources import input_files
from pipelines.sources.locate import Located, locate_input
from pipelines.sources.one_type import OneType
from schemas.column_types import alike, is_empty, type_words
from schemas.errors import ConfigError, TableError, quoted
from schemas.runs import InputFile, InputTable
from schemas.settings import RunConfig
from schemas.tables import (
    CANDIDATES,
    EXCLUSIONS,
    USER_EXCLUSIONS,
    CandidateShape,
    IdType,
    TableContract,
    candidate_shape,
    id_type,
)


def check_inputs(
    config: RunConfig, inputs: dict[str, InputTable], schemas: dict[str, pa.Schema]
) -> tuple[IdType, IdType]:
    """What the tables must hold besides their contracts; the types of users' and items' ids."""
    if inputs["users"].rows == 0:
        raise TableError(
            "users: the table is empty",
            expected="at least one user",
            got=f"0 rows in {len(inputs['users'].files)} file(s)",
            where=config.inputs.paths["users"],
            field="inputs.users",
        )
    check_shards(config, inputs["users"])
    user_id = _id_type_of(schemas["users"], "user_id", "users", config)
    item_id: IdType = "string"
    if "catalog" in schemas:
        item_id = _id_type_of(schemas["catalog"], "item_id", "catalog", config)
    check_id_types(schemas, inputs, user_id, item_id)
    check_segments(schemas, inputs)
    if config.task.eligible is not None:
        check_types(config.task.eligible, schemas["users"], schemas["catalog"])
        shards = num_shards(config, inputs["users"])
        check_segment_count(config, inputs["users"], inputs["catalog"].rows, shards)
    return user_id, item_id


def _id_type_of(schema: pa.Schema, column: str, table: str, config: RunConfig) -> IdType:
    dtype = schema.field(column).type
    if is_empty(dtype):
        raise TableError(
            f"{table}: column {column!r} holds nothing in any file",
            expected="ids",
            got="nulls only",
            where=config.inputs.paths[table],
            field=column,
        )
    return id_type(dtype)


def tables_of_spark(config: RunConfig) -> Iterator[ConfigError]:
    """Inputs that Spark alone can read."""
    for name, table in config.inputs.tables.items():
        yield ConfigError(
            f"inputs.{name} is a table of Spark's catalog",
            expected="--launcher spark, which knows it; or the path of Parquet files",
            got=quoted(table),
            field=f"inputs.{name}",
        )


def list_inputs(config: RunConfig) -> tuple[dict[str, InputTable], dict[str, pa.Schema]]:
    """Every file of every table, each checked against the table's contract on its own."""
    tables: dict[str, InputTable] = {}
    schemas: dict[str, pa.Schema] = {}
    by_segment = False
    for name in tables_read(config):
        located = list_table(config, name)
        found: list[InputFile] = []
        columns: dict[str, str] = {}  # of the first file
        types, shape = OneType(name), None
        for file in located.files:
            described, schema = describe_input(config, name, file)
            if not found:
                columns = {field.name: str(field.type) for field in schema}
            if name == "candidates":
                shape = check_shape(config, schema, file, before=shape)
                by_segment = shape == "segment"
                contract = CANDIDATES[shape]
            else:
                contract = contract_of(config, name, by_segment=by_segment)
                contract.check(schema, file)
            for problem in types.problems(contract, schema, file):
                raise problem
            found.append(described)
        schemas[name] = types.schema()
        columns |= {field.name: str(field.type) for field in schemas[name]}
        tables[name] = InputTable(
            name=name, files=tuple(found), columns=columns, snapshot=located.snapshot
        )
    return tables, schemas


def tables_read(config: RunConfig) -> dict[str, str]:
    """The tables that a run reads, and where they are; candidates say what users need, so they come
    first.
    """
    paths = {name: path for name, path in config.inputs.paths.items() if path is not None}
    if not config.task.uses_candidates:
        paths.pop("candidates", None)
    if not config.task.gives_lists:
        paths.pop("exclusions", None)
    if not config.needs_items:
        paths.pop("catalog", None)
    order = ("candidates", "users", "catalog", "exclusions")
    return {name: paths[name] for name in order if name in paths}


def list_table(config: RunConfig, name: str) -> Located:
    """The files of one table."""
    return list_items(config) if name == "catalog" else locate_input(config, name)


def describe_input(config: RunConfig, name: str, file: str) -> tuple[InputFile, pa.Schema]:
    """Size, rows, version and Arrow schema of one file of a table."""
    return (
        describe_items(config, file) if name == "catalog" else input_files.describe_file(file, name)
    )


def contract_of(config: RunConfig, name: str, *, by_segment: bool) -> TableContract:
    """What users, the catalog or exclusions must hold for this run."""
    if name == "users":
        return contract_of_users(config, by_segment=by_segment)
    return items_contract(config) if name == "catalog" else EXCLUSIONS


def check_shape(
    config: RunConfig, schema: pa.Schema, file: str, *, before: CandidateShape | None = None
) -> CandidateShape:
    """The shape of a candidates file.

    Raises:
        TableError: it has none, or not that of the files before, or one that is joined where
            nothing is.
    """
    shape = candidate_shape(schema, file)
    if before not in (None, shape):
        raise TableError(
            "candidates: files have different shapes",
            expected=f"columns {_columns_of(before)}, as in the first file",
            got=f"columns {_columns_of(shape)}",
            where=file,
            field="inputs.candidates",
        )
    if config.inputs.self_contained and shape in ("long", "wide"):
        raise TableError(
            "candidates of each user are not joined with inputs.self_contained",
            expected="the users column item_ids, or candidates by segment or for all",
            got=f"the columns of {shape} candidates",
            where=file,
            field="inputs.candidates",
        )
    return shape


def _columns_of(shape: CandidateShape | None) -> str:
    return ", ".join(c.name for c in CANDIDATES[shape].columns) if shape else ""


def check_shards(config: RunConfig, users: InputTable) -> None:
    """Raise `TableError` when a file of a self-contained table is too large to be a shard."""
    most = config.run.shard_users
    large = max(users.files, key=lambda file: file.rows)
    if config.inputs.self_contained and large.rows > most:
        raise TableError(
            "users: a file is too large to be a shard",
            expected=f"at most run.shard_users = {most} rows per file, with inputs.self_contained",
            got=f"{large.rows} rows",
            where=large.path,
            do="Write smaller files, raise run.shard_users, or leave inputs.self_contained out.",
            field="run.shard_users",
        )


def num_shards(config: RunConfig, users: InputTable) -> int:
    """Shards that the users of a run are cut into."""
    if config.inputs.self_contained:
        return len(users.files)
    return max(1, -(-users.rows // config.run.shard_users))


def check_segments(schemas: Mapping[str, pa.Schema], inputs: Mapping[str, InputTable]) -> None:
    """Candidates by segment find users only if both write a segment the same way."""
    candidates = schemas.get("candidates")
    if candidates is None or "segment" not in candidates.names or "user_id" in candidates.names:
        return
    users, theirs = (s.field("segment").type for s in (schemas["users"], candidates))
    if not alike(users, theirs):
        raise TableError(
            "candidates: segments have another type than in users",
            expected=type_words(users),
            got=type_words(theirs),
            where=inputs["candidates"].files[0].path,
            do="Cast one of the two.",
            field="segment",
        )


def check_id_types(
    schemas: Mapping[str, pa.Schema], inputs: Mapping[str, InputTable], user_id: str, item_id: str
) -> None:
    """The same id must have the same type in every table, or nothing would ever join."""
    items = ("item_id", "item_ids", "history", USER_EXCLUSIONS)
    expected = {"user_id": user_id, **dict.fromkeys(items, item_id)}
    owner = {"user_id": "users", **dict.fromkeys(items, "catalog")}
    for table, schema in schemas.items():
        for column, want in expected.items():
            if column not in schema.names:
                continue
            if is_empty(schema.field(column).type):
                continue
            got = id_type(schema.field(column).type)
            if got != want:
                raise TableError(
                    f"{table}: ids in column {column!r} have another type than in {owner[column]}",
                    expected=want,
                    got=type_words(schema.field(column).type),
                    where=inputs[table].files[0].path,
                    do="Cast one of the two; ids keep their type and are never converted.",
                    field=column,
                )


def vector_dim(config: RunConfig, schema: pa.Schema, users: InputTable) -> int | None:
    """Length that every user vector must have; None when the prompt has no vector.

    The projector decides. Without one (backend `fake`), the table does: its fixed size, or the
    commonest length among its first rows.

    Raises:
        TableError: vectors of a fixed size that is not the projector's.
    """
    if not config.prompt.parsed.uses("user_vector"):
        return None
    dtype = schema.field("embedding").type
    fixed = dtype.list_size if pa.types.is_fixed_size_list(dtype) else None
    if config.engine.projector is not None:
        wanted = read_projector_spec(config.engine.projector).input_dim
        if fixed not in (None, wanted):
            raise TableError(
                "users: column 'embedding' does not fit the projector",
                expected=f"vectors of length {wanted}",
                got=f"length {fixed}",
                where=users.files[0].path,
                field="embedding",
            )
        return wanted
    if fixed is not None:
        return int(fixed)
    for file in users.files:  # the first ones may have no rows, or no vectors in them
        lengths = input_files.first_list_lengths(file.path, "embedding")
        if len(lengths):
            return int(np.bincount(lengths).argmax())
    return 1

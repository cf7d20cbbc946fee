"""Plan a run: list and check the inputs, hash everything that decides the result, cut it into
shards.

The run's id comes from those hashes: the same configuration on the same inputs is the same run, so
that running it again continues it, and any change starts another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from engine.prompts.projector_spec import read_projector_spec
from engine.prompts.tokenizer import check_model, load_tokenizer, vocab_size
from engine.tasks import tasks_of
from pipelines.catalog.items import describe_items, items_contract, list_items
from pipelines.inputs.eligibility import check_types
from pipelines.inputs.segment_count import check_segment_count
from pipelines.inputs.shard_columns import contract_of_users
from pipelines.inputs.unchanged import hash_model
from pipelines.planning.engine_check import backend_problems, engine_problems, fit_prompt
from pipelines.planning.overlaps import overlapping
from pipelines.publish import check_output
from pipelines.sources import input_files
from pipelines.sources.locate import Located, locate_input
from pipelines.sources.one_type import OneType
from pipelines.storage import files
from schemas.column_types import alike, is_empty, type_words
from schemas.errors import (
    AccessError,
    ConfigError,
    TableError,
    quoted,
)
from schemas.extras import missing_for
from schemas.runs import InputFile, InputTable, RunPlan
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

_LAUNCH_ONLY = (
    "launcher",
    "workers",
    "max_attempts",
    "shard_timeout_s",
    "start_timeout_s",
    "price_per_hour",
    "metrics_dir",
    "keep_days",
)
_BATCH_ONLY = ("max_batch_tokens", "max_batch_users")


def plan_run(config: RunConfig) -> RunPlan:
    """Check everything that can be checked without a device, and say what will be done.

    Raises:
        ConfigError: a setting cannot be used, or the output is not writable.
        InputError: a table is missing, empty, or breaks its contract.
        EngineError: the engine could not start with this model, as far as its files tell.
    """
    if config.ds is None:
        raise ConfigError("no partition date", expected="--ds YYYY-MM-DD, or ds in the file")
    ds = config.ds
    for problem in backend_problems(config):
        raise problem
    for table in tables_of_spark(config):
        raise table
    for overlap in overlapping(config):
        raise overlap
    inputs, schemas = _list_inputs(config)
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
    tokenizer = load_tokenizer(config)
    check_model(config, tokenizer)
    for task in tasks_of(config):
        if (wrong := task.check(tokenizer, vocab_size(config))) is not None:
            raise wrong
    config = fit_prompt(config, tokenizer)
    for problem in engine_problems(config, tokenizer):
        raise problem
    check_writable(config)
    check_output(config, user_id, item_id)

    model, model_files = hash_model(config.engine.model, "engine.model")
    projector, projector_files = hash_model(config.engine.projector, "engine.projector")
    hashes = {
        "config": _hash_config(config),
        "inputs": _hash_inputs(inputs),
        "model": model,
        "projector": projector,
    }
    digest = files.hash_bytes(json.dumps(hashes, sort_keys=True).encode())
    run_id = f"{ds}-{_slug(config.surface)}-{digest[:12]}"
    return RunPlan(
        run_id=run_id,
        ds=ds,
        surface=config.surface,
        config=config,
        inputs=inputs,
        hashes=hashes,
        model_files={"model": model_files, "projector": projector_files},
        num_shards=num_shards(config, inputs["users"]),
        user_id_type=user_id,
        item_id_type=item_id,
        vector_dim=vector_dim(config, schemas["users"], inputs["users"]),
        run_dir=files.join(config.run.work_dir, run_id),
    )


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


def _list_inputs(config: RunConfig) -> tuple[dict[str, InputTable], dict[str, pa.Schema]]:
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


def check_writable(config: RunConfig) -> None:
    """Raise `ConfigError` for the first place that the run could not write to; `StorageError` where
    that cannot be told now: a full disk, a store that does not answer.
    """
    for problem in unwritable(config):
        raise problem


def unwritable(config: RunConfig) -> Iterator[ConfigError]:
    """An error for each place that the run could not write to, or with what is not installed."""
    for path, setting in (
        (config.output.path, "output.path"),
        (config.run.work_dir, "run.work_dir"),
        (config.run.metrics_dir, "run.metrics_dir"),
    ):
        if path is None:
            continue
        if path.startswith("memory:"):
            yield ConfigError(
                f"{setting} is in the memory of one process",
                expected="a folder, or an object store, that every process of the run sees",
                got=path,
                field=setting,
            )
            continue
        try:
            files.check_writable(path, setting)
        except AccessError as err:
            yield err
    yield from missing_for(config)


def _hash_config(config: RunConfig) -> str:
    """Everything in the configuration that decides the rows: not how it is launched, and not how
    users are batched, which changes no item and no score beyond the stated tolerance.
    """
    kept = config.model_dump(mode="json")
    del kept["audit"], kept["report"], kept["spark"]
    for section, names in (("run", _LAUNCH_ONLY), ("engine", _BATCH_ONLY)):
        for name in names:
            del kept[section][name]
    return files.hash_bytes(json.dumps(kept, sort_keys=True).encode())


def _hash_inputs(inputs: Mapping[str, InputTable]) -> str:
    told = {n: t.model_dump(mode="json", exclude_none=True) for n, t in inputs.items()}
    text = json.dumps(told, sort_keys=True)
    return files.hash_bytes(text.encode())


def _slug(text: str) -> str:
    """A surface as part of a file name."""
    return "".join(char if char.isalnum() else "_" for char in text)[:40]

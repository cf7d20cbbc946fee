"""The tables of a run against their contracts: every file, every column, all that is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from pipelines.inputs.eligibility import check_types
from pipelines.inputs.segment_count import check_segment_count
from pipelines.planning.input_tables import (
    check_id_types,
    check_segments,
    check_shape,
    check_shards,
    contract_of,
    describe_input,
    list_table,
    num_shards,
    tables_read,
    vector_dim,
)
from pipelines.preflight.findings import Findings, Problem
from pipelines.sources.one_type import OneType
from schemas.column_types import ID, ID_LIST, is_empty
from schemas.config_problems import ConfigReport
from schemas.eligibility import attributes, user_columns
from schemas.errors import EngineError, NightshelfError, TableError
from schemas.runs import InputFile, InputTable
from schemas.settings import TABLE, RunConfig
from schemas.tables import (
    CANDIDATES,
    USER_EXCLUSIONS,
    CandidateShape,
    IdType,
    TableContract,
    id_type,
)

_UNKNOWN_DATE = "{ds}"
_IDS = ("user_id", "item_id", "item_ids", "history", USER_EXCLUSIONS)


@dataclass(frozen=True)
class TableSeen:
    """A table as far as it can be read. `schema` is the first good file's."""

    table: InputTable
    schema: pa.Schema
    bad_columns: frozenset[str]  # of any of its files

    @property
    def usable(self) -> bool:
        """Whether every column that a run reads is there and right."""
        return not self.bad_columns


@dataclass(frozen=True)
class TablesSeen:
    """The tables of a run by name; one that cannot be read at all is not there."""

    tables: dict[str, TableSeen]
    shape: CandidateShape | None
    vector_dim: int | None

    def type_of(self, table: str, column: str) -> IdType | None:
        """The type of ids in a column; None where that is not known."""
        seen = self.tables.get(table)
        if seen is None or column in seen.bad_columns or column not in seen.schema.names:
            return None
        return id_type(seen.schema.field(column).type)


def check_tables(report: ConfigReport, config: RunConfig, findings: Findings) -> TablesSeen:
    """Look at every file of every table, and at what tables must agree on."""
    tables: dict[str, TableSeen] = {}
    shape: CandidateShape | None = None
    for name, path in tables_read(config).items():
        if report.is_repaired(f"inputs.{name}") or _UNKNOWN_DATE in path:
            continue
        if name == "catalog" and config.sid is None and config.text is None:
            continue  # nobody knows which columns name the items
        if path.startswith(TABLE):
            findings.warn(
                Problem(
                    kind="input",
                    file=findings.config_file,
                    field=f"inputs.{name}",
                    message=f"{name}: a table of Spark's catalog is not looked at",
                    got=path.removeprefix(TABLE),
                    remedy="`plan --launcher spark` checks it.",
                )
            )
            continue
        seen, found = _check_table(config, name, path, shape, findings)
        shape = found if name == "candidates" else shape
        if seen is not None:
            tables[name] = seen
    users = tables.get("users")
    if users is not None and users.table.rows == 0:
        findings.add_error(
            TableError(
                "users: the table is empty",
                expected="at least one user",
                got=f"0 rows in {len(users.table.files)} file(s)",
                where=config.inputs.paths["users"],
                field="inputs.users",
                do="Write the users, or point inputs.users at where they are.",
            )
        )
    elif users is not None:
        with findings.collecting():
            check_shards(config, users.table)
    _check_ids(tables, findings)
    _check_eligibility(config, tables, findings)
    with findings.collecting(field="segment"):
        if "users" in tables and "segment" in tables["users"].schema.names:
            schemas = {n: t.schema for n, t in tables.items()}
            check_segments(schemas, {n: t.table for n, t in tables.items()})
    return TablesSeen(tables, shape, _check_vectors(config, tables, findings))


def _check_table(
    config: RunConfig, name: str, path: str, shape: CandidateShape | None, findings: Findings
) -> tuple[TableSeen | None, CandidateShape | None]:
    """One table. Of candidates, which shape they have."""
    setting = f"inputs.{name}"
    try:
        located = list_table(config, name)
    except (NightshelfError, OSError) as err:
        remedy = f"Correct {setting}, or write the table there."
        findings.add_error(_as_ours(err, name), file=path, field=setting, remedy=remedy)
        return None, None
    types = OneType(name)
    described: list[InputFile] = []
    bad: set[str] = set()
    for file in located.files:
        try:
            info, schema = describe_input(config, name, file)
        except (NightshelfError, OSError) as err:
            remedy = "Write the file again, or take it out of the folder."
            findings.add_error(_as_ours(err, name), file=file, field=setting, remedy=remedy)
            bad.add("*")
            continue
        described.append(info)
        if name == "candidates":
            try:
                shape = check_shape(config, schema, file, before=shape)
            except TableError as err:
                findings.add_error(err, field=setting, remedy=_remedy(config, name, "item_id"))
                bad.add("*")
                continue
            contract = CANDIDATES[shape]
        else:
            contract = contract_of(config, name, by_segment=shape == "segment")
            for error in contract.problems(schema, file):
                assert error.field is not None, "a contract names its column"
                findings.add_error(error, remedy=_remedy(config, name, error.field))
                bad.add(error.field)
        good = tuple(column for column in contract.columns if column.name not in bad)
        for error in types.problems(TableContract(name, good), schema, file):
            findings.add_error(error)
    if not described:
        return None, shape
    found = types.schema()
    columns = {field.name: str(field.type) for field in found}
    table = InputTable(
        name=name, files=tuple(described), columns=columns, snapshot=located.snapshot
    )
    return TableSeen(table, found, frozenset(bad)), shape


def _as_ours(error: NightshelfError | OSError, table: str) -> NightshelfError:
    """A store that cannot be reached is a problem like the others."""
    if isinstance(error, NightshelfError):
        return error
    return TableError(f"{table}: cannot be read", got=f"{type(error).__name__}: {error}"[:300])


def _remedy(config: RunConfig, table: str, column: str) -> str:
    """What to do about a column, by the setting that asks for it."""
    rule = config.task.eligible
    named: dict[str, str] = {}
    if table == "users":
        slots = {"embedding": "{user_vector}", "history": "{history}", "user_sid": "{user_sid}"}
        for name in (*config.prompt.parsed.columns, *slots):
            slot = slots.get(name, f"{{{name}}}")
            named[name] = f"take {slot} out of prompt.template"
        if rule is not None:
            named |= dict.fromkeys(user_columns(rule), "take it out of task.eligibility")
        if config.task.k_column is not None:
            named[config.task.k_column] = "leave task.k_column out"
        if config.task.labels_column is not None:
            named[config.task.labels_column] = "leave task.label.labels_column out"
    elif table == "catalog" and rule is not None:
        named |= dict.fromkeys(attributes(rule), "take it out of task.eligibility")
    instead = f", or {named[column]}" if column in named else ""
    return (
        f"Write column {column!r} with the type expected, or rename the one that holds it{instead}."
    )


def _check_ids(tables: dict[str, TableSeen], findings: Findings) -> None:
    """Ids have one type in all tables: one problem per table and column."""
    owners = {"user_id": ("users", "user_id"), "item_id": ("catalog", "item_id")}
    kinds = {}
    for kind, (owner, column) in owners.items():
        seen = tables.get(owner)
        if seen is None or column not in seen.schema.names or column in seen.bad_columns:
            continue
        if is_empty(seen.schema.field(column).type):
            continue
        kinds[kind] = id_type(seen.schema.field(column).type)
    for name, seen in tables.items():
        for column in _IDS:
            kind = "user_id" if column == "user_id" else "item_id"
            known = column in seen.schema.names and column not in seen.bad_columns
            if not known or kind not in kinds or name == owners[kind][0] and column == kind:
                continue
            if not _is_id(seen.schema.field(column).type):
                continue  # a column that no contract looked at
            with findings.collecting():
                schema = {name: pa.schema([seen.schema.field(column)])}
                found = {name: seen.table}
                check_id_types(schema, found, kinds.get("user_id", ""), kinds.get("item_id", ""))


def _is_id(dtype: pa.DataType) -> bool:
    return ID.accepts(dtype) or ID_LIST.accepts(dtype)


def _check_eligibility(config: RunConfig, tables: dict[str, TableSeen], findings: Findings) -> None:
    """Comparisons of types that cannot be compared, once the columns are there."""
    rule = config.task.eligible
    if rule is None or not {"users", "catalog"} <= tables.keys():
        return
    asked = {"users": user_columns(rule), "catalog": attributes(rule)}
    for name, columns in asked.items():
        if any(c in tables[name].bad_columns for c in columns):
            return
    with findings.collecting(
        field="task.eligibility", remedy="Compare values of one type, or cast the column."
    ):
        check_types(rule, tables["users"].schema, tables["catalog"].schema)
        users, items = tables["users"].table, tables["catalog"].table.rows
        if tables["users"].usable:
            check_segment_count(config, users, items, num_shards(config, users))


def _check_vectors(
    config: RunConfig, tables: dict[str, TableSeen], findings: Findings
) -> int | None:
    """Length of user vectors; None where it is not known."""
    users = tables.get("users")
    if users is None or "embedding" in users.bad_columns:
        return None
    remedy = (
        "Use the projector that was trained on these vectors, or the vectors it was trained on."
    )
    try:
        return vector_dim(config, users.schema, users.table)
    except TableError as err:
        findings.add_error(err, remedy=remedy)
    except EngineError:
        pass  # the projector cannot be read: that is said where the model is looked at
    return None

"""Contracts of the tables: which columns, of which types, and the message when a file differs.

Ids are strings or int64 and keep their type from input to output. Unknown columns are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.types as pt

from schemas.column_types import (
    ATTRIBUTE,
    ENCRYPTED,
    ID,
    ID_LIST,
    INT_LIST,
    NUMBER,
    SCALAR,
    SID,
    TEXT,
    VECTOR,
    Kind,
    is_list,
    is_whole,
    type_words,
)
from schemas.errors import TableError, did_you_mean
from schemas.templates import PromptTemplate

IdType = Literal["string", "int64"]
ID_TYPES: dict[str, pa.DataType] = {"string": pa.string(), "int64": pa.int64()}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a contract."""

    name: str
    kind: Kind
    required: bool = True
    in_all_or_none: bool = False  # of the files: where it is missing, that means something else


@dataclass(frozen=True, slots=True)
class TableContract:
    """The columns a table must and may have."""

    table: str
    columns: tuple[Column, ...]

    def check(self, schema: pa.Schema, file: str) -> None:
        """Raise `TableError` naming file, column, expected and got, for the first column that
        differs.
        """
        for problem in self.problems(schema, file):
            raise problem

    def problems(self, schema: pa.Schema, file: str) -> Iterator[TableError]:
        """The error of every column that differs."""
        for column in self.columns:
            indices = schema.get_all_field_indices(column.name)
            if len(indices) > 1:
                yield TableError(
                    f"{self.table}: column {column.name!r} stands {len(indices)} times",
                    where=file,
                    field=column.name,
                )
            elif not indices:
                if column.required:
                    yield TableError(
                        f"{self.table}: column {column.name!r} is missing",
                        expected=column.kind.words,
                        got=f"columns {', '.join(schema.names)}"
                        + did_you_mean(column.name, schema.names),
                        where=file,
                        field=column.name,
                    )
            elif ENCRYPTED in (schema.field(column.name).metadata or {}):
                yield TableError(
                    f"{self.table}: column {column.name!r} is encrypted",
                    expected="a column that can be read without a key",
                    where=file,
                    do="Write it unencrypted for this run; no key is ever asked for.",
                    field=column.name,
                )
            elif not pt.is_null(dtype := schema.field(column.name).type) and not (
                column.kind.accepts(dtype)
            ):
                yield TableError(
                    f"{self.table}: column {column.name!r} has the wrong type",
                    expected=column.kind.words,
                    got=type_words(dtype),
                    where=file,
                    field=column.name,
                )

    def read_of(self, schema: pa.Schema) -> pa.Schema:
        """The part of a schema that is read; other columns have no part in any check. A name that
        stands twice is in none.
        """
        places = (schema.get_field_index(name) for name in self.present(schema))
        return pa.schema([schema.field(place) for place in places if place >= 0])

    def present(self, schema: pa.Schema) -> list[str]:
        """Names of the contract's columns that this schema has."""
        return [column.name for column in self.columns if column.name in schema.names]


def users_contract(
    template: PromptTemplate,
    *,
    by_segment: bool = False,
    history: bool = False,
    more: Iterable[Column] = (),
) -> TableContract:
    """The users table, as far as a prompt reads it, and what else a run reads of it.

    Args:
        by_segment: candidate sets are those of each user's segment.
        history: it is read, whether or not the template has it.
        more: columns besides; one that the prompt reads too is there once.
    """
    columns = [Column("user_id", ID)]
    if template.uses("user_vector"):
        columns.append(Column("embedding", VECTOR))
    if history or template.uses("history"):
        columns.append(Column("history", ID_LIST))
    if template.uses("user_sid"):
        columns.append(Column("user_sid", INT_LIST))
    columns += [
        Column(name, SCALAR)
        for name in template.columns
        if name not in ("user_id", "embedding", "history", "user_sid")
    ]
    if by_segment and "segment" not in template.columns:
        columns.append(Column("segment", SCALAR))
    return TableContract("users", (*columns, *more))


def catalog_contract(attributes: tuple[str, ...]) -> TableContract:
    """The catalog, with the attributes that the eligibility reads."""
    named = {column.name for column in CATALOG.columns}
    more = tuple(Column(name, ATTRIBUTE) for name in attributes if name not in named)
    return TableContract("catalog", CATALOG.columns + more)


def text_catalog_contract(text: str, attributes: tuple[str, ...] = ()) -> TableContract:
    """A catalog whose items are named by the column `text`; it needs no semantic IDs."""
    columns = {c.name: c for c in CATALOG.columns if c.name not in ("sid", text)}
    columns[text] = Column(text, TEXT)
    more = [Column(name, ATTRIBUTE) for name in attributes if name not in columns]
    return TableContract("catalog", (*columns.values(), *more))


CATALOG = TableContract(
    "catalog",
    (
        Column("item_id", ID),
        Column("sid", SID),
        Column("popularity", NUMBER, required=False),
        Column("title", TEXT, required=False),
        Column("text", TEXT, required=False),
    ),
)
EXCLUSIONS = TableContract("exclusions", (Column("user_id", ID), Column("item_id", ID)))
USER_CANDIDATES, USER_EXCLUSIONS = "item_ids", "excluded_item_ids"  # of users, self-contained

CandidateShape = Literal["long", "wide", "segment", "shared"]
CANDIDATES: dict[CandidateShape, TableContract] = {
    "wide": TableContract("candidates", (Column("user_id", ID), Column("item_ids", ID_LIST))),
    "long": TableContract("candidates", (Column("user_id", ID), Column("item_id", ID))),
    "segment": TableContract(
        "candidates", (Column("segment", SCALAR), Column("item_ids", ID_LIST))
    ),
    "shared": TableContract("candidates", (Column("item_id", ID),)),
}


TruthShape = Literal["long", "wide"]
TRUTH: dict[TruthShape, TableContract] = {
    "wide": TableContract("truth", (Column("user_id", ID), Column("item_ids", ID_LIST))),
    "long": TableContract(
        "truth",
        (
            Column("user_id", ID),
            Column("item_id", ID),
            Column("weight", NUMBER, required=False, in_all_or_none=True),
            # Another name of the weight.
            Column("relevance", NUMBER, required=False, in_all_or_none=True),
        ),
    ),
}


def shape_of(names: Iterable[str]) -> CandidateShape | None:
    """The shape of a candidates table by the names of its columns; None where they fit none."""
    have = set(names)
    for shape, contract in CANDIDATES.items():
        if {column.name for column in contract.columns} <= have:
            return shape
    return None


def candidate_shape(schema: pa.Schema, file: str) -> CandidateShape:
    """Which of the four shapes a candidates file has, by its column names."""
    shape = shape_of(schema.names)
    if shape is not None:
        CANDIDATES[shape].check(schema, file)
        return shape
    raise TableError(
        "candidates: the columns are none of the known shapes",
        expected="(user_id, item_id), (user_id, item_ids), (segment, item_ids) or (item_id)",
        got=f"columns {', '.join(schema.names)}",
        where=file,
    )


def id_type(dtype: pa.DataType) -> IdType:
    """The type ids of this Arrow type have inside: strings stay strings, integers become int64."""
    if is_list(dtype):
        dtype = dtype.value_type
    return "int64" if is_whole(dtype) else "string"


# Columns that a prepared shard has besides those of the users table. The dot keeps them apart from
# any column a template can name.
FILE = "shard.file"  # where the row came from; null: candidates of a user that is not in users
DUPLICATE = "shard.duplicate"  # the user stood before
CANDIDATE_LIST = "shard.candidates"
EXCLUDED_LIST = "shard.excluded"
K_COLUMN = "shard.k"
LABELS_COLUMN = "shard.labels"
ELIGIBILITY = "eligibility."  # prefix of what task.eligibility reads, in its own type


LABEL_SCORES = pa.list_(pa.struct([("label", pa.string()), ("score", pa.float32())]))


def recommendations_schema(
    user_id: IdType, item_id: IdType, more: Iterable[pa.Field] = ()
) -> pa.Schema:
    """The published table, long layout, without its partition columns `ds` and `surface`.

    Those stand in the path, as Hive, Spark and pyarrow expect: a file that repeats them makes
    `pyarrow.parquet.read_table(root)` fail. `more`: the columns that its tasks add.
    """
    fields = [
        pa.field("user_id", ID_TYPES[user_id], nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("item_id", ID_TYPES[item_id], nullable=False),
        pa.field("score", pa.float32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("exact", pa.bool_(), nullable=False),
        pa.field("run_id", pa.string(), nullable=False),
    ]
    return pa.schema([*fields, *more])


def embeddings_schema(user_id: IdType, width: int) -> pa.Schema:
    """The published table of embeddings: one vector per user."""
    return pa.schema(
        [
            pa.field("user_id", ID_TYPES[user_id], nullable=False),
            pa.field("embedding", pa.list_(pa.float32(), width), nullable=False),
            pa.field("run_id", pa.string(), nullable=False),
        ]
    )


def outcomes_schema(user_id: IdType) -> pa.Schema:
    """One row per user that was not quarantined: what it got and what it took."""
    return pa.schema(
        [
            pa.field("user_id", ID_TYPES[user_id], nullable=False),
            pa.field("status", pa.string(), nullable=False),
            pa.field("reason", pa.string()),
            pa.field("returned", pa.int32(), nullable=False),
            pa.field("exact", pa.bool_(), nullable=False),
            pa.field("legal_mass", pa.float32()),
            pa.field("prompt_tokens", pa.int32(), nullable=False),
            pa.field("reused_tokens", pa.int32(), nullable=False),
            pa.field("truncated_tokens", pa.int32(), nullable=False),
            pa.field("rows_forwarded", pa.int32(), nullable=False),
        ]
    )


QUARANTINE = pa.schema(
    [
        pa.field("ds", pa.string(), nullable=False),
        pa.field("surface", pa.string(), nullable=False),
        pa.field("table", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("rule", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
        pa.field("payload", pa.string()),
        pa.field("file", pa.string()),
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
    ]
)

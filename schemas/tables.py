"""Contracts of the tables: which columns, of which types, and the message when a file differs.

Ids are strings or int64 and keep their type from input to output. Unknown columns are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.types as pt

from schemas.errors import TableError, did_you_mean
from schemas.templates import PromptTemplate

IdType = Literal["string", "int64"]
ID_TYPES: dict[str, pa.DataType] = {"string": pa.string(), "int64": pa.int64()}


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of Arrow types a column may have."""

    words: str
    accepts: Callable[[pa.DataType], bool]


def _plain(dtype: pa.DataType) -> pa.DataType:
    return dtype.value_type if pt.is_dictionary(dtype) else dtype


def type_words(dtype: pa.DataType) -> str:
    """An Arrow type in words, without the names that files give to list elements."""
    if is_list(dtype):
        size = f", {dtype.list_size}" if pt.is_fixed_size_list(dtype) else ""
        return f"list<{type_words(dtype.value_type)}{size}>"
    return str(dtype)


def _is_text(dtype: pa.DataType) -> bool:
    dtype = _plain(dtype)
    return bool(pt.is_string(dtype) or pt.is_large_string(dtype) or pt.is_string_view(dtype))


def _is_int(dtype: pa.DataType) -> bool:
    return bool(pt.is_signed_integer(dtype) or pt.is_uint8(dtype) or pt.is_uint16(dtype))


def _is_id(dtype: pa.DataType) -> bool:
    return _is_text(dtype) or _is_int(_plain(dtype))


def is_list(dtype: pa.DataType) -> bool:
    """Any of the three list types."""
    return bool(pt.is_list(dtype) or pt.is_large_list(dtype) or pt.is_fixed_size_list(dtype))


def _list_of(inner: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    return lambda dtype: is_list(dtype) and inner(dtype.value_type)


def _is_scalar(dtype: pa.DataType) -> bool:
    dtype = _plain(dtype)
    simple = pt.is_integer(dtype) or pt.is_floating(dtype) or pt.is_boolean(dtype)
    date = pt.is_temporal(dtype) and not pt.is_duration(dtype)
    return bool(simple or _is_text(dtype) or date or pt.is_decimal(dtype))


def _is_number(dtype: pa.DataType) -> bool:
    return bool(pt.is_integer(dtype) or pt.is_floating(dtype))


ID = Kind("string or int64", _is_id)
ID_LIST = Kind("list of string or of int64", _list_of(_is_id))
VECTOR = Kind("list or fixed_size_list of float16, float32 or float64", _list_of(pt.is_floating))
INT_LIST = Kind("list of integers", _list_of(pt.is_integer))
SCALAR = Kind("string, number, boolean or date", _is_scalar)
ATTRIBUTE = Kind(
    "string, number, boolean, date, or a list of them",
    lambda dtype: _is_scalar(dtype) or _list_of(_is_scalar)(dtype),
)
TEXT = Kind("string", _is_text)
NUMBER = Kind("number", _is_number)
INTEGER = Kind("integer, at most 64 bits with a sign", lambda t: _is_int(t) or pt.is_uint32(t))
LABELS = Kind("list of string or of int64", _list_of(_is_id))
SID = Kind(
    "list of codes, list of token strings, or one string '<a_1><b_2>'",
    lambda dtype: _is_text(dtype) or _list_of(lambda t: pt.is_integer(t) or _is_text(t))(dtype),
)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a contract."""

    name: str
    kind: Kind
    required: bool = True


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
            elif not column.kind.accepts(dtype := schema.field(column.name).type):
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
    eligibility: tuple[str, ...] = (),
    k_column: str | None = None,
    labels_column: str | None = None,
    candidates: bool = False,
    exclusions: bool = False,
    history: bool = False,
) -> TableContract:
    """The users table, as far as a run reads it.

    That is: the template, the history where its items are left out, candidate sets by segment, the
    users columns of the eligibility, k, and labels; where it is self-contained, each user's
    candidates and exclusions as well.
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
    named = {column.name for column in columns}
    columns += [Column(name, ATTRIBUTE) for name in eligibility if name not in named]
    if k_column is not None:
        columns.append(Column(k_column, INTEGER))
    if labels_column is not None:
        columns.append(Column(labels_column, LABELS))
    if candidates:
        columns.append(Column(USER_CANDIDATES, ID_LIST))
    if exclusions:
        columns.append(Column(USER_EXCLUSIONS, ID_LIST, required=False))
    return TableContract("users", tuple(columns))


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
            Column("weight", NUMBER, required=False),
            Column("relevance", NUMBER, required=False),  # another name of the weight
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


def same_values(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether equal values of two scalar columns are written alike: 1 and 1.0 are not."""
    one, other = _plain(one), _plain(other)
    kinds = (_is_text, pt.is_integer, pt.is_boolean)
    return one == other or any(kind(one) and kind(other) for kind in kinds)


def id_type(dtype: pa.DataType) -> IdType:
    """The type ids of this Arrow type have inside: strings stay strings, integers become int64."""
    if is_list(dtype):
        dtype = dtype.value_type
    return "string" if _is_text(dtype) else "int64"


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


def recommendations_schema(user_id: IdType, item_id: IdType, *, labels: bool = False) -> pa.Schema:
    """The published table, long layout, without its partition columns `ds` and `surface`.

    Those stand in the path, as Hive, Spark and pyarrow expect: a file that repeats them makes
    `pyarrow.parquet.read_table(root)` fail. `labels`: with the scores of `task.label`.
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
    if labels:
        fields.append(pa.field("labels", LABEL_SCORES, nullable=False))
    return pa.schema(fields)


def embeddings_schema(user_id: IdType, width: int) -> pa.Schema:
    """The published table of `task.embed`: one vector per user."""
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

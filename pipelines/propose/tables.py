"""What the user's tables hold: columns by the names a run knows, their types, and samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.catalog.readers import layout_of
from pipelines.sources import input_files
from schemas.column_types import ID, ID_LIST, INT_LIST, SCALAR, TEXT, VECTOR, type_words
from schemas.errors import TableError
from schemas.tables import (
    EXCLUSIONS,
    CandidateShape,
    Column,
    TableContract,
    candidate_shape,
    id_type,
)

_SAMPLE = 10_000
_KNOWN = {"user_id", "embedding", "history", "user_sid", "segment"}


@dataclass(frozen=True)
class UsersGuess:
    """The users table, as far as prompts can be made of it."""

    rows: int
    id_type: str
    vector_dim: int | None
    history_items: int | None  # of nearly all users: the 99th percentile
    has_user_sid: bool
    has_segment: bool
    texts: tuple[str, ...]
    scalars: tuple[str, ...]
    ignored: tuple[str, ...]  # columns that look like slots, and why they are none


def guess_users(path: str, item_type: str | None) -> UsersGuess:
    """Look at the users table.

    Raises:
        TableError: it is missing or empty, or has no user_id.
    """
    paths = input_files.list_parquet(path, "users")
    infos = [input_files.describe_file(one, "users") for one in paths]
    schema, rows = infos[0][1], sum(info.rows for info, _ in infos)
    TableContract("users", (Column("user_id", ID),)).check(schema, paths[0])
    if rows == 0:
        raise TableError("users: the table is empty", expected="at least one user", where=path)
    sampled = [name for name in ("embedding", "history") if name in schema.names]
    head = input_files.read_head(next(i.path for i, _ in infos if i.rows), _SAMPLE, sampled)
    ignored: list[str] = []

    def has(name: str, kind: Column) -> bool:
        if name not in schema.names:
            return False
        if not kind.kind.accepts(schema.field(name).type):
            found = type_words(schema.field(name).type)
            ignored.append(f"{name} ({found}, needed {kind.kind.words})")
            return False
        return True

    history = has("history", Column("history", ID_LIST))
    if history and item_type is not None:
        found = id_type(schema.field("history").type)
        if found != item_type:
            history = False
            ignored.append(f"history (ids are {found}, those of the catalog {item_type})")
    vectors = has("embedding", Column("embedding", VECTOR))
    for name, kind in (("embedding", VECTOR), ("history", ID_LIST)):
        if name not in schema.names:
            alike = [f.name for f in schema if f.name not in _KNOWN and kind.accepts(f.type)]
            ignored += [f"{one} (of the right type, if its name were {name})" for one in alike]
    others = [f for f in schema if f.name not in _KNOWN and SCALAR.accepts(f.type)]
    return UsersGuess(
        rows=rows,
        id_type=id_type(schema.field("user_id").type),
        vector_dim=_vector_dim(head.column("embedding")) if vectors else None,
        history_items=_history_items(head.column("history")) if history else None,
        has_user_sid=has("user_sid", Column("user_sid", INT_LIST)),
        has_segment=has("segment", Column("segment", SCALAR)),
        texts=tuple(f.name for f in others if TEXT.accepts(f.type)),
        scalars=tuple(f.name for f in others if not TEXT.accepts(f.type)),
        ignored=tuple(ignored),
    )


def _vector_dim(column: pa.ChunkedArray) -> int:
    """Length that most vectors have."""
    if pa.types.is_fixed_size_list(column.type):
        return int(column.type.list_size)
    lengths = pc.list_value_length(column).drop_null().to_numpy()
    return int(np.bincount(lengths).argmax()) if len(lengths) else 1


def _history_items(column: pa.ChunkedArray) -> int:
    lengths = pc.list_value_length(column).drop_null().to_numpy()
    return int(np.ceil(np.quantile(lengths, 0.99))) if len(lengths) else 0


def guess_candidates(path: str, users: UsersGuess, item_type: str) -> CandidateShape:
    """Which shape the candidates have.

    Raises:
        TableError: none of the known ones, or ids of another type than in the other tables.
    """
    file = input_files.list_parquet(path, "candidates")[0]
    _, schema = input_files.describe_file(file, "candidates")
    shape = candidate_shape(schema, file)
    if shape == "segment" and not users.has_segment:
        raise TableError(
            "candidates are by segment, and users have none",
            expected="a column 'segment' in users",
            where=file,
        )
    _check_ids(schema, file, "candidates", users.id_type, item_type)
    return shape


def check_exclusions(path: str, users: UsersGuess, item_type: str) -> None:
    """Raise `TableError` when the exclusions cannot be used."""
    file = input_files.list_parquet(path, "exclusions")[0]
    _, schema = input_files.describe_file(file, "exclusions")
    EXCLUSIONS.check(schema, file)
    _check_ids(schema, file, "exclusions", users.id_type, item_type)


def _check_ids(schema: pa.Schema, file: str, table: str, user_type: str, item_type: str) -> None:
    wanted = {"user_id": user_type, "item_id": item_type, "item_ids": item_type}
    for column, want in wanted.items():
        if column in schema.names and id_type(schema.field(column).type) != want:
            raise TableError(
                f"{table}: ids in column {column!r} have another type than in the other tables",
                expected=want,
                got=type_words(schema.field(column).type),
                where=file,
                do="Cast one of the two; ids keep their type and are never converted.",
            )


def guess_text_column(file: str) -> str | None:
    """The column that names items by text, where a catalog has no semantic IDs; else None."""
    if layout_of(file) != ".parquet":
        return None  # the other layouts all hold semantic IDs
    _, schema = input_files.describe_file(file, "catalog")
    if "sid" in schema.names:
        return None
    named = [n for n in ("text", "title") if n in schema.names]
    return next((n for n in named if TEXT.accepts(schema.field(n).type)), None)

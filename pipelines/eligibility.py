"""Eligible items of a shard's users: one mask over the catalog per segment of users, not per user.

A *segment* is one combination of the users columns that the expression reads. The expression is
compiled and evaluated once for each; users then point at their segment's mask.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from schemas.column_types import type_words
from schemas.eligibility import (
    Comparison,
    Constant,
    Expression,
    Flag,
    Junction,
    Negation,
    attributes,
    user_columns,
)
from schemas.errors import ConfigError, RunError, quoted
from schemas.requests import Eligibility

_MOST_CELLS = 1 << 28  # segments x items of a shard; the trie's counts take some bytes for each
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def eligible_items(expression: Expression, users: pa.Table, catalog: pa.Table) -> Eligibility:
    """Masks `[segments, items]` and the segment of each user.

    Args:
        users: a column per users column of the expression, no nulls. catalog: a column per
        attribute of the expression. An attribute that is null matches nothing.

    Raises:
        RunError: more segments than memory has room for.
    """
    items = pl.from_arrow(catalog.select(list(attributes(expression))))
    assert isinstance(items, pl.DataFrame), "a table is a frame"
    names = list(user_columns(expression))
    if not names:
        mask = _evaluate(expression, {}, items)
        return Eligibility(np.zeros(len(users), dtype=np.int64), mask[None])
    frame = pl.from_arrow(users.select(names))
    assert isinstance(frame, pl.DataFrame), "a table is a frame"
    segment = frame.select(pl.struct(names).rank("dense").cast(pl.Int64) - 1).to_series()
    first = frame.with_columns(segment.alias("__segment")).unique("__segment", keep="first")
    rows = first.sort("__segment").drop("__segment").to_dicts()
    if len(rows) * len(catalog) > _MOST_CELLS:
        raise RunError(
            "task.eligibility makes too many segments of the users of a shard",
            expected=f"at most {_MOST_CELLS // len(catalog):,} with {len(catalog):,} items",
            got=f"{len(rows):,} combinations of {', '.join(names)}",
            do="Compare with columns of fewer values, or lower run.shard_users.",
        )
    masks = [_evaluate(expression, row, items) for row in rows]
    empty = np.zeros((0, len(catalog)), dtype=bool)
    return Eligibility(segment.to_numpy(), np.stack(masks) if masks else empty)


def check_types(expression: Expression, users: pa.Schema, catalog: pa.Schema) -> None:
    """Raise `ConfigError` for a comparison of types that cannot be compared."""
    fields = {name: users.field(name).type for name in user_columns(expression)}
    values = {name: _sample(dtype) for name, dtype in fields.items()}
    empty = catalog.empty_table().select(list(attributes(expression)))
    nothing = pl.from_arrow(empty)
    assert isinstance(nothing, pl.DataFrame), "a table is a frame"
    try:
        _evaluate(expression, values, nothing)
    except (pl.exceptions.PolarsError, TypeError) as err:
        raise ConfigError(
            "task.eligibility compares what cannot be compared",
            got=quoted(str(err).splitlines()[0]),
            where="catalog columns "
            + ", ".join(f"{field.name} {type_words(field.type)}" for field in empty.schema),
        ) from err


def _sample(dtype: pa.DataType) -> Any:
    """Some value of a type, as a shard would give it."""
    if pa.types.is_dictionary(dtype):
        dtype = dtype.value_type
    if (
        pa.types.is_list(dtype)
        or pa.types.is_large_list(dtype)
        or pa.types.is_fixed_size_list(dtype)
    ):
        return [_sample(dtype.value_type)]
    some = {pa.types.is_boolean: False, pa.types.is_integer: 0, pa.types.is_floating: 0.0}
    for is_type, value in some.items():
        if is_type(dtype):
            return value
    return pa.scalar(0).cast(pa.int64()).cast(dtype).as_py() if pa.types.is_temporal(dtype) else ""


def _evaluate(
    expression: Expression, user: Mapping[str, Any], items: pl.DataFrame
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask = items.select(_compile(expression, user).fill_null(value=False).alias("m")).to_series()
    out: np.ndarray[Any, np.dtype[np.bool_]] = mask.to_numpy()
    return out


def _compile(expression: Expression, user: Mapping[str, Any]) -> pl.Expr:
    match expression:
        case Flag(attribute):
            return pl.col(attribute).cast(pl.Boolean)
        case Negation(inner):
            return _compile(inner, user).not_()
        case Junction(word, parts):
            compiled = [_compile(part, user) for part in parts]
            return pl.all_horizontal(compiled) if word == "and" else pl.any_horizontal(compiled)
        case Comparison(attribute, sign, operand):
            value = operand.value if isinstance(operand, Constant) else user[operand.name]
            return _compare(pl.col(attribute), sign, value)


def _compare(column: pl.Expr, sign: str, value: Any) -> pl.Expr:
    if sign == "contains":
        return column.list.contains(value)
    if sign in ("in", "not in"):
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        found = column.is_in(values)
        return found if sign == "in" else found.not_()
    out: pl.Expr = _COMPARE[sign](column, value)
    return out

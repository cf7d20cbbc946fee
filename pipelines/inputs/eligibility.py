"""Eligible items of a shard's users: one mask over the catalog per segment of users, not per user.

A *segment* is one combination of the users columns that the expression reads. The expression is
evaluated once for each; users then point at their segment's mask. An attribute that is null, or
NaN, is unknown: neither a comparison with it holds nor its opposite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs import eligibility_operands as operands
from pipelines.inputs.eligibility_operands import Value
from pipelines.sources.column_values import converted
from schemas.column_types import is_empty, is_list, is_whole, plain, portable, type_words
from schemas.eligibility import (
    Comparison,
    Constant,
    Expression,
    Flag,
    Junction,
    Negation,
    PartitionDate,
    UserColumn,
    leaves,
    user_columns,
)
from schemas.errors import ConfigError, TableError
from schemas.requests import Eligibility

_MOST_CELLS = 1 << 28  # segments x items of a shard; the trie's counts take some bytes for each
_COMPARE: dict[str, Callable[[pa.Array, pa.Scalar], pa.Array]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
Row = Mapping[str, pa.Scalar]  # values of the users columns of one segment


def eligible_items(expression: Expression, users: pa.Table, catalog: pa.Table) -> Eligibility:
    """Masks `[segments, items]` and the segment of each user.

    Args:
        expression: with its date, see `with_date`.
        users: a column per users column of the expression, no nulls. catalog: a column per
        attribute of the expression. An attribute that is null matches nothing.

    Raises:
        TableError: more segments than memory has room for.
    """
    items = _Items(catalog)
    names = list(user_columns(expression))
    if not names:
        mask = items.mask(expression, {})
        return Eligibility(np.zeros(len(users), dtype=np.int64), mask[None])
    columns = {name: users.column(name) for name in names}
    users = pa.table({n: _as(c, portable(plain(c.type)), "users") for n, c in columns.items()})
    frame = pl.from_arrow(users)
    assert isinstance(frame, pl.DataFrame), "a table is a frame"
    segment = frame.select(pl.struct(names).rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()
    _, first = np.unique(segment, return_index=True)
    if len(first) * len(catalog) > _MOST_CELLS:
        raise too_many_segments(len(first), len(catalog), names)
    rows = [{name: users.column(name)[int(row)] for name in names} for row in first]
    masks = [items.mask(expression, row) for row in rows]
    empty = np.zeros((0, len(catalog)), dtype=bool)
    return Eligibility(segment, np.stack(masks) if masks else empty)


def most_cells() -> int:
    """Segments times items that a shard may have."""
    return _MOST_CELLS


def too_many_segments(segments: int, items: int, names: Sequence[str]) -> TableError:
    """The error of a shard whose masks memory has no room for."""
    return TableError(
        "task.eligibility makes too many segments of the users of a shard",
        expected=f"at most {_MOST_CELLS // items:,} with {items:,} items",
        got=f"{segments:,} combinations of {', '.join(names)}",
        do="Compare with columns of fewer values, or lower run.shard_users.",
        field="task.eligibility",
    )


def check_types(expression: Expression, users: pa.Schema, catalog: pa.Schema) -> None:
    """Raise `ConfigError` for a comparison of types that cannot be compared, or a text that is not
    what it is compared with.
    """
    for leaf in leaves(expression):
        attribute = catalog.field(leaf.attribute).type
        if is_empty(attribute):
            continue
        problem = _problem(leaf, attribute, users)
        if problem:
            raise ConfigError(
                "task.eligibility compares what cannot be compared",
                expected=problem,
                got=str(leaf),
                where=f"catalog column {leaf.attribute} is {type_words(attribute)}"
                + _operand_words(leaf, users),
                field="task.eligibility",
            )


def _operand_words(leaf: Comparison | Flag, users: pa.Schema) -> str:
    if not isinstance(leaf, Comparison) or not isinstance(leaf.operand, UserColumn):
        return ""
    name = leaf.operand.name
    return f", users column {name} is {type_words(users.field(name).type)}"


def _problem(leaf: Comparison | Flag, attribute: pa.DataType, users: pa.Schema) -> str:
    """What a comparison should be; nothing where it can be made."""
    if isinstance(leaf, Flag):
        flag = pa.types.is_boolean(attribute) or is_whole(attribute)
        return "" if flag else "a boolean column, or a comparison"
    if (leaf.operator == "contains") != is_list(attribute):
        return "a list column before `contains`, and before it alone"
    inner = attribute.value_type if is_list(attribute) else attribute
    kind = operands.family(inner)
    try:
        operands.check_zone(inner)
    except ValueError as err:
        return str(err)
    match leaf.operand:
        case UserColumn(name):
            found = users.field(name).type
            listed, theirs = is_list(found), found.value_type if is_list(found) else found
            empty = is_empty(found)
            fits = empty or operands.comparable(kind, operands.family(theirs))
            problem = "" if fits else f"a users column to compare a {kind} with"
        case Constant(value):
            listed = isinstance(value, tuple)
            values = value if isinstance(value, tuple) else (value,)
            problem = next(filter(None, (_problem_of(one, inner) for one in values)), "")
        case PartitionDate():
            listed, problem = False, _problem_of("2026-01-01", inner)
    if listed and leaf.operator not in ("in", "not in"):
        return f"one value behind `{leaf.operator}`; a list stands behind `in` and `not in`"
    return problem


def _problem_of(literal: str | float | bool, attribute: pa.DataType) -> str:
    try:
        value = operands.of_literal(literal, attribute)
    except ValueError as err:
        return str(err)
    kind = operands.family(attribute)
    return "" if operands.comparable(kind, value.family) else f"a {kind}"


def _as(column: pa.ChunkedArray, dtype: pa.DataType, table: str) -> pa.Array:
    """The column in the one type of its values; as it is where it has it, as in a run."""
    whole = column.combine_chunks()
    return whole if whole.type == dtype else converted(whole, dtype, "", table)


class _Items:
    """Attributes of all items, and which of them an expression holds for."""

    def __init__(self, catalog: pa.Table) -> None:
        self._catalog = catalog
        self._columns: dict[str, _Attribute] = {}

    def mask(self, expression: Expression, row: Row) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Items `[N]` that it holds for; what is unknown does not hold."""
        known = pc.fill_null(self._of(expression, row), fill_value=False)
        out: np.ndarray[tuple[int], np.dtype[np.bool_]] = known.to_numpy(zero_copy_only=False)
        return out

    def _of(self, expression: Expression, row: Row) -> pa.Array:
        """True, false, or null where it is not known."""
        match expression:
            case Negation(inner):
                return pc.invert(self._of(inner, row))
            case Junction(word, parts):
                out = self._of(parts[0], row)
                join = pc.and_kleene if word == "and" else pc.or_kleene
                for part in parts[1:]:
                    out = join(out, self._of(part, row))
                return out
            case Flag(attribute):
                return self._attribute(attribute).flag()
            case Comparison(attribute, operator, operand):
                column = self._attribute(attribute)
                return column.holds(operator, _values(operand, row, column.dtype))

    def _attribute(self, name: str) -> _Attribute:
        if name not in self._columns:
            self._columns[name] = _Attribute(self._catalog.column(name))
        return self._columns[name]


def _values(
    operand: UserColumn | Constant | PartitionDate, row: Row, attribute: pa.DataType
) -> list[Value]:
    """The values of an operand; those that are null are none."""
    match operand:
        case UserColumn(name):
            scalar = row[name]
            scalars = scalar.values if is_list(scalar.type) else [scalar]
            return [operands.of_scalar(one) for one in scalars if one.is_valid]
        case Constant(tuple() as literals):
            return [operands.of_literal(one, attribute) for one in literals]
        case Constant(literal):
            return [operands.of_literal(literal, attribute)]  # type: ignore[arg-type]  # no tuple
    raise AssertionError("{ds} was replaced before")


class _Attribute:
    """A column of the catalog, or the flat values of one of lists."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        dtype = plain(column.type)  # with its zone
        empty = is_empty(dtype)
        self._column = _as(column, portable(dtype) if empty else dtype, "catalog")

    @cached_property
    def _flat(self) -> pa.Array:
        """What is compared: booleans as 0 and 1, NaN as null."""
        column = self._column
        flat = column.flatten() if is_list(column.type) else column
        if pa.types.is_boolean(flat.type):
            return flat.cast(pa.int64())
        if pa.types.is_floating(flat.type):
            return pc.if_else(pc.is_nan(flat), pa.scalar(None, flat.type), flat)
        return flat

    @property
    def dtype(self) -> pa.DataType:
        """The type of what is compared."""
        return self._flat.type

    def flag(self) -> pa.Array:
        """Which items have it."""
        if self._flat.null_count == len(self._flat):
            return pa.nulls(len(self._flat), pa.bool_())
        return pc.not_equal(self._flat, pa.scalar(0, self.dtype))

    def holds(self, operator: str, values: list[Value]) -> pa.Array:
        """For which items a comparison holds."""
        flat = self._flat
        if flat.null_count == len(flat) and not is_list(self._column.type):
            return pa.nulls(len(flat), pa.bool_())  # of whatever type
        if operator == "contains":
            return self._in_lists(self._any(values))
        if operator in ("in", "not in"):
            found = self._any(values)
            return found if operator == "in" else pc.invert(found)
        if not values:  # a user's null, which is set aside before
            return pa.nulls(len(flat), pa.bool_())
        return self._compare(operator, values[0])

    def _any(self, values: list[Value]) -> pa.Array:
        """Which values are one of some."""
        if self._flat.null_count == len(self._flat):
            return pa.nulls(len(self._flat), pa.bool_())
        fitted = (self._fitted(value) for value in values)
        found = pa.array([one for one in fitted if one is not None], self.dtype)
        known = self._flat.is_valid()
        return pc.if_else(known, pc.is_in(self._flat, found), pa.scalar(None, pa.bool_()))

    def _fitted(self, value: Value) -> pa.Scalar | None:
        """A value in the column's type; None where no value of that type is equal."""
        if not operands.counts(self.dtype):
            exact = value.exact
            if pa.types.is_floating(self.dtype):
                exact = operands.nearest(value, self.dtype)
            return None if exact is None else pa.scalar(exact, self.dtype)
        count = operands.in_units(value, self.dtype)
        low, high = operands.limits(self.dtype)
        if count is None or not low <= count <= high or count // 1 != count:
            return None
        return operands.scalar_of(int(count), self.dtype)

    def _in_lists(self, hit: pa.Array) -> pa.Array:
        """Which lists hold a value that `hit` marks; null for a null list."""
        at = np.flatnonzero(pc.fill_null(hit, fill_value=False).to_numpy(zero_copy_only=False))
        found = np.zeros(len(self._column), dtype=bool)
        lengths = pc.fill_null(pc.list_value_length(self._column), 0).to_numpy()
        found[np.repeat(np.arange(len(lengths)), lengths)[at]] = True
        return pa.array(found, mask=self._column.is_null().to_numpy(zero_copy_only=False))

    def _compare(self, sign: str, value: Value) -> pa.Array:
        flat, dtype = self._flat, self.dtype
        if not len(flat):
            return pa.array([], pa.bool_())
        if operands.counts(dtype):
            return self._compare_counts(sign, operands.in_units(value, dtype))
        if pa.types.is_floating(dtype):
            number = operands.nearest(value, dtype)
            return _COMPARE[sign](flat, pa.scalar(number, dtype))
        return _COMPARE[sign](flat, pa.scalar(value.exact, dtype))

    def _compare_counts(self, sign: str, count: Fraction | float | None) -> pa.Array:
        """Compare with an exact number of units, which may lie between two values of the column or
        beyond all of them.
        """
        if count is None:
            return pa.nulls(len(self._flat), pa.bool_())
        low, high = operands.limits(self.dtype)
        if not low <= count <= high:
            holding = "<" if count > high else ">"
            return self._always(holds=sign[0] in ("!", holding))
        whole = int(count // 1)
        if whole != count:
            if sign in ("=", "!="):
                return self._always(holds=sign == "!=")
            sign = "<=" if sign[0] == "<" else ">"
        return _COMPARE[sign](self._flat, operands.scalar_of(whole, self.dtype))

    def _always(self, *, holds: bool) -> pa.Array:
        """One answer for all that is known."""
        known = self._flat.is_valid()
        return pc.if_else(known, pa.scalar(holds), pa.scalar(None, pa.bool_()))

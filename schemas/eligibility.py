"""Eligibility expressions: which items a user may get, by the catalog's attributes.

    market contains {user.market} and age_rating <= {user.max_age} and not adult

Operands on the left are catalog columns; on the right literals (`3`, `'eu'`, `['a', 'b']`, `true`),
columns of the users table, `{user.column}`, or the partition's date, `{ds}`. A text that is
compared with a date, a time or a timestamp is read as one. Operators: `=`, `!=`, `<`, `<=`, `>`,
`>=`, `in`, `not in`, `contains` (a list column holds the value); a bare column must be boolean;
`and`, `or`, `not`, parentheses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NoReturn, cast, get_args

from schemas.errors import ConfigError, quoted

Operator = Literal["=", "!=", "<", "<=", ">", ">=", "in", "not in", "contains"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class UserColumn:
    """`{user.column}`."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal, or a list of them."""

    value: Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class PartitionDate:
    """`{ds}`, a text `YYYY-MM-DD`."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`attribute operator operand`."""

    attribute: str
    operator: Operator
    operand: UserColumn | Constant | PartitionDate

    def __str__(self) -> str:
        match self.operand:
            case UserColumn(name):
                words = f"{{user.{name}}}"
            case Constant(tuple() as values):
                words = f"[{', '.join(map(_literal, values))}]"
            case Constant(value):
                words = _literal(value)
            case _:
                words = "{ds}"
        return f"{self.attribute} {self.operator} {words}"


def _literal(value: Scalar | tuple[Scalar, ...]) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """A boolean attribute."""

    attribute: str

    def __str__(self) -> str:
        return self.attribute


@dataclass(frozen=True, slots=True)
class Negation:
    """`not expression`."""

    inner: Expression


@dataclass(frozen=True, slots=True)
class Junction:
    """Expressions joined by `and` or by `or`."""

    word: Literal["and", "or"]
    parts: tuple[Expression, ...]


Expression = Comparison | Flag | Negation | Junction


def leaves(expression: Expression) -> Iterator[Comparison | Flag]:
    """The comparisons and flags of an expression."""
    match expression:
        case Negation(inner):
            yield from leaves(inner)
        case Junction(_, parts):
            for part in parts:
                yield from leaves(part)
        case _:
            yield expression


def with_date(expression: Expression, ds: str) -> Expression:
    """The expression with the partition's date in the place of `{ds}`: a text as any other."""
    match expression:
        case Negation(inner):
            return Negation(with_date(inner, ds))
        case Junction(word, parts):
            return Junction(word, tuple(with_date(part, ds) for part in parts))
        case Comparison(attribute, operator, PartitionDate()):
            return Comparison(attribute, operator, Constant(ds))
    return expression


def attributes(expression: Expression) -> tuple[str, ...]:
    """Catalog columns that an expression reads, each once."""
    return tuple(dict.fromkeys(leaf.attribute for leaf in leaves(expression)))


def user_columns(expression: Expression) -> tuple[str, ...]:
    """Users columns that an expression reads, each once."""
    operands = (leaf.operand for leaf in leaves(expression) if isinstance(leaf, Comparison))
    return tuple(dict.fromkeys(o.name for o in operands if isinstance(o, UserColumn)))


def parse_eligibility(source: str) -> Expression:
    """Parse an expression.

    Raises:
        ConfigError: naming the place that cannot be read.
    """
    return _Parser(source).parse()


_TOKEN = re.compile(
    r"\s*(?:(?P<user>\{user\.[A-Za-z_]\w*\})|(?P<date>\{ds\})|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<number>-?\d+(?:\.\d+)?)|(?P<text>'[^']*'|\"[^\"]*\")|(?P<sign>==|!=|<=|>=|[=<>()\[\],]))"
)
_DEEPEST = 50  # parentheses and `not` around a comparison
_LONGEST_NUMBER = 100  # characters
_WORDS = {"and", "or", "not", "in", "contains", "true", "false"}


class _Parser:
    """Recursive descent: or, and, not, comparison."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens: list[tuple[str, str, int]] = []
        at = 0
        while source[at:].strip():
            found = _TOKEN.match(source, at)
            if found is None:
                self._fail(at)
            assert found.lastgroup is not None, "every alternative of a token has a name"
            self._tokens.append((found.lastgroup, found[found.lastgroup], found.start()))
            at = found.end()
        self._tokens.append(("end", "", len(source)))
        self._next = 0
        self._depth = 0

    def parse(self) -> Expression:
        out = self._junction("or")
        if self._peek()[0] != "end":
            self._fail(self._peek()[2])
        return out

    def _peek(self) -> tuple[str, str, int]:
        return self._tokens[self._next]

    def _take(self) -> tuple[str, str, int]:
        self._next += 1
        return self._tokens[self._next - 1]

    def _accept(self, text: str) -> bool:
        if self._peek()[1] == text and self._peek()[0] in ("word", "sign"):
            self._next += 1
            return True
        return False

    def _junction(self, word: Literal["and", "or"]) -> Expression:
        def part() -> Expression:
            return self._junction("and") if word == "or" else self._negation()

        parts = [part()]
        while self._accept(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else Junction(word, tuple(parts))

    def _negation(self) -> Expression:
        self._depth += 1
        try:
            return self._inner()
        finally:
            self._depth -= 1

    def _inner(self) -> Expression:
        if self._depth > _DEEPEST:
            self._fail(self._peek()[2], f"at most {_DEEPEST} of ( and not around a comparison")
        if self._accept("not"):
            return Negation(self._negation())
        if self._accept("("):
            out = self._junction("or")
            if not self._accept(")"):
                self._fail(self._peek()[2])
            return out
        return self._comparison()

    def _comparison(self) -> Expression:
        kind, name, at = self._take()
        if kind != "word" or name in _WORDS:
            self._fail(at)
        kind, text, at = self._peek()
        if text == "not" and self._tokens[self._next + 1][1] == "in":
            self._next += 2
            return Comparison(name, "not in", self._operand())
        if text in ("in", "contains") or (kind == "sign" and text not in "()[],"):
            self._next += 1
            operator = cast(Operator, "=" if text == "==" else text)  # the signs are these
            return Comparison(name, operator, self._operand())
        return Flag(name)

    def _operand(self) -> UserColumn | Constant | PartitionDate:
        if self._peek()[0] == "date":
            self._next += 1
            return PartitionDate()
        if self._peek()[0] == "user":
            return UserColumn(self._take()[1][len("{user.") : -1])
        if not self._accept("["):
            return Constant(self._scalar())
        values = [self._scalar()]
        while self._accept(","):
            values.append(self._scalar())
        if not self._accept("]"):
            self._fail(self._peek()[2])
        return Constant(tuple(values))

    def _scalar(self) -> Scalar:
        kind, text, at = self._take()
        if kind == "text":
            return text[1:-1]
        if kind == "number" and len(text) > _LONGEST_NUMBER:
            self._fail(at, f"numbers of at most {_LONGEST_NUMBER} characters")
        if kind == "number":
            return float(text) if "." in text else int(text)
        if text in ("true", "false"):
            return text == "true"
        return self._fail(at)

    def _fail(
        self, at: int, expected: str = "like: market contains {user.market} and not adult"
    ) -> NoReturn:
        raise ConfigError(
            "task.eligibility cannot be read",
            expected=expected,
            got=f"{quoted(self._source[at : at + 20])} at character {at} of {quoted(self._source)}",
        )

"""Prompt templates: literal text with typed slots, `"User {user_vector} saw {history}. Next: "`.

Slots: `{user_vector}` (soft tokens), `{history}` (the items' SID tokens), `{user_sid}` (the user's
own SID tokens), `{text:column}` (a string column) and `{column}` (any scalar column, written as
text). `{{` and `}}` stand for literal braces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from schemas.errors import ConfigError, quoted

SlotKind = Literal["static", "user_vector", "history", "user_sid", "text"]

_SLOT = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of a prompt: literal `text` (static) or a slot filled from `column`."""

    kind: SlotKind
    text: str = ""
    column: str = ""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A parsed template. `source` is what the user wrote."""

    source: str
    segments: tuple[Segment, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the users table whose values are written as text, each once, in order."""
        return tuple(dict.fromkeys(s.column for s in self.segments if s.kind == "text"))

    def uses(self, kind: SlotKind) -> bool:
        """Whether any segment is of this kind."""
        return any(s.kind == kind for s in self.segments)

    @property
    def num_static(self) -> int:
        """How many leading segments are the same for every user."""
        for index, segment in enumerate(self.segments):
            if segment.kind != "static":
                return index
        return len(self.segments)


def parse_template(source: str) -> PromptTemplate:
    """Parse a template.

    Raises:
        ConfigError: an unbalanced brace, an unknown slot form, or a slot that may stand only once.
    """
    segments: list[Segment] = []
    literal, end = "", 0
    for match in _SLOT.finditer(source):
        literal += source[end : match.start()]
        end = match.end()
        if match[0] in ("{{", "}}"):
            literal += match[0][0]
        elif match[1] is None:
            raise ConfigError(
                "prompt.template has an unbalanced brace",
                got=f"{match[0]!r} at character {match.start()} of {quoted(source)}",
                do="Write '{{' and '}}' for literal braces.",
            )
        else:
            if literal:
                segments.append(Segment("static", text=literal))
                literal = ""
            segments.append(_slot(match[1], source))
    literal += source[end:]
    if literal:
        segments.append(Segment("static", text=literal))
    if not segments:
        raise ConfigError("prompt.template is empty", expected="text with at least one slot")
    for kind in ("user_vector", "history", "user_sid"):
        if sum(s.kind == kind for s in segments) > 1:
            raise ConfigError(f"prompt.template has {{{kind}}} more than once", expected="one")
    return PromptTemplate(source, tuple(segments))


def _slot(inside: str, source: str) -> Segment:
    kind, colon, column = inside.partition(":")
    if colon and kind == "text" and column in ("embedding", "history", "user_sid"):
        raise ConfigError(
            f"prompt.template reads column {column!r} as text",
            expected="{user_vector}, {history} or {user_sid}, or a column of text",
            got=f"{{{inside}}}",
        )
    if colon and kind == "text" and _NAME.fullmatch(column):
        return Segment("text", column=column)
    if not colon and inside == "user_vector":
        return Segment("user_vector", column="embedding")
    if not colon and inside == "history":
        return Segment("history", column="history")
    if not colon and inside == "user_sid":
        return Segment("user_sid", column="user_sid")
    if not colon and inside == "embedding":
        return _slot("text:embedding", source)  # refused: it is written {user_vector}
    if not colon and _NAME.fullmatch(inside):
        return Segment("text", column=inside)
    raise ConfigError(
        "prompt.template has a slot that cannot be read",
        expected="{user_vector}, {history}, {user_sid}, {text:column} or {column}",
        got=f"{{{inside}}} in {quoted(source)}",
    )

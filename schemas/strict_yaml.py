"""YAML read strictly: nothing is replaced, guessed or dropped silently, and each value has a line.

A plain reader lets the last of two equal keys win, takes `22:30` for 1350, `010` for 8, and unfolds
nine lines of aliases into gigabytes. Here each of them is an error that names the key and the line.
Dates stay text, `1e3` is a number. What is read is built from PyYAML's events, one document deep.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from schemas.errors import ConfigError, quoted

Keys = tuple[str | int, ...]

LARGEST_FILE = 1 << 20  # bytes
_DEEPEST = 32  # levels
_MOST_NODES = 100_000  # values, those of aliases counted where they stand
_LONGEST_NUMBER = 100  # characters
_TEXT_TAG = "tag:yaml.org,2002:str"
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {
    form: value
    for words, value in ((("yes", "true", "on"), True), (("no", "false", "off"), False))
    for word in words
    for form in (word, word.title(), word.upper())
}
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_ZERO_FIRST = re.compile(r"[-+]?0[0-9_]+")
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")  # what no file name and no UTF-8 can hold


@dataclass(frozen=True)
class Document:
    """What a YAML text says.

    `lines` has the line, from 1, of each key of a mapping and of each item of a list, by its place:
    `("task", "k")`, `("sid", "sizes", 0)`; that of the whole is `()`.
    """

    value: Any
    lines: dict[Keys, int]


def read_yaml(text: str, where: str) -> Document:
    """One YAML document.

    Args:
        where: what is read, for the words of an error: a path, or an argument.

    Raises:
        ConfigError: it is no YAML, or says something that readers take in more than one way.
    """
    builder = _Builder(where)
    loader: Any = None
    try:
        loader = yaml.SafeLoader(text)
        return Document(builder.document(iter(loader.get_event, None)), builder.lines)
    except yaml.reader.ReaderError as err:
        line = text.count("\n", 0, int(err.position)) + 1
        raise ConfigError(
            "a character that YAML does not allow",
            got=f"U+{int(err.character):04X}" if isinstance(err.character, int) else err.reason,
            where=f"{where}:{line}",
            do="Take it out, or write it as an escape in double quotes.",
        ) from None
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        ending = "" if mark is None else f":{mark.line + 1}"
        said = " ".join(part for part in (err.context, err.problem) if part)
        raise ConfigError(
            "the configuration file cannot be read",
            expected="YAML",
            got=" ".join(said.split()),
            where=where + ending,
        ) from None
    except (yaml.YAMLError, ValueError, OverflowError) as err:  # an escape beyond Unicode
        raise ConfigError(
            "the configuration file cannot be read",
            expected="YAML",
            got=" ".join(str(err).split()),
            where=where if loader is None else f"{where}:{loader.line + 1}",
        ) from None


def decoded(data: bytes, where: str) -> str:
    """The text of a file in UTF-8, with or without a byte order mark.

    Raises:
        ConfigError: it is in another encoding, or too long for a configuration.
    """
    if len(data) > LARGEST_FILE:
        raise ConfigError(
            "the configuration file is too long",
            expected=f"at most {LARGEST_FILE:,} bytes",
            got=f"{len(data):,} or more",
            where=where,
        )
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ConfigError(
            "the configuration file has another encoding",
            expected="UTF-8",
            got="UTF-16 or UTF-32",
            where=f"{where}:1",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        line = data.count(b"\n", 0, err.start) + 1
        raise ConfigError(
            "the configuration file has another encoding",
            expected="UTF-8",
            got=f"the byte 0x{data[err.start]:02x}",
            where=f"{where}:{line}",
        ) from None


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def named(keys: Keys) -> str:
    """A place as people write it: `sid.sizes[2]`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".") or "file"


@dataclass
class _Builder:
    where: str
    lines: dict[Keys, int] = field(default_factory=dict)
    anchors: dict[str, Any] = field(default_factory=dict)
    open_anchors: set[str] = field(default_factory=set)
    nodes: int = 0

    def document(self, events: Iterator[Any]) -> Any:
        """The only document of a stream; None of an empty one."""
        value, seen = None, False
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if seen:
                    self._refuse((), event, "a second document", "one document in a file")
                seen = True
            elif isinstance(event, yaml.NodeEvent):
                self.lines[()] = _line(event)
                value = self._value(event, events, ())
        return value

    def _value(self, event: Any, events: Iterator[Any], keys: Keys) -> Any:
        self._count(event, keys)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, keys)
        anchor = event.anchor
        if anchor is not None:
            self.open_anchors.add(anchor)
        if isinstance(event, yaml.ScalarEvent):
            value: Any = self._scalar(event, keys)
        else:
            if event.tag is not None:
                self._refuse(keys, event, f"the tag {event.tag}", "no tags")
            if len(keys) >= _DEEPEST:
                self._refuse(keys[:3], event, "values too deep", f"at most {_DEEPEST} levels")
            mapping = isinstance(event, yaml.MappingStartEvent)
            value = self._mapping(events, keys) if mapping else self._list(events, keys)
        if anchor is not None:
            self.open_anchors.discard(anchor)
            self.anchors[anchor] = value
        return value

    def _mapping(self, events: Iterator[Any], keys: Keys) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._key(event, keys)
            place, line = (*keys, key), _line(event)
            if key in found:
                raise ConfigError(
                    f"{named(place)}: the key stands twice",
                    expected="each key once",
                    got=f"lines {self.lines[place]} and {line}",
                    where=f"{self.where}:{line}",
                    do="Take one out, or merge the two.",
                    field=named(place),
                )
            self.lines[place] = line
            found[key] = self._value(next(events), events, place)
        return found

    def _key(self, event: Any, keys: Keys) -> str:
        expected = "text"
        if not isinstance(event, yaml.ScalarEvent):
            kind = "an alias" if isinstance(event, yaml.AliasEvent) else "a list or a mapping"
            self._refuse(keys, event, f"{kind} as a key", expected)
        if event.value == "<<" and event.implicit[0]:
            self._refuse(keys, event, "the merge key <<", "the keys themselves, written out")
        key = self._scalar(event, (*keys, event.value))
        if not isinstance(key, str):
            self._refuse(
                keys, event, f"the key {quoted(event.value)}, which YAML reads as {quoted(key)}",
                "text: put it in quotes",
            )  # fmt: skip
        return str(key)

    def _list(self, events: Iterator[Any], keys: Keys) -> list[Any]:
        found: list[Any] = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            place = (*keys, len(found))
            self.lines[place] = _line(event)
            found.append(self._value(event, events, place))
        return found

    def _alias(self, event: Any, keys: Keys) -> Any:
        if event.anchor in self.open_anchors:
            self._refuse(keys, event, f"*{event.anchor} inside what it names", "no such circle")
        if event.anchor not in self.anchors:
            self._refuse(keys, event, f"*{event.anchor}", "the name of an anchor above it")
        return self._copied(self.anchors[event.anchor], event, keys)

    def _copied(self, value: Any, event: Any, keys: Keys) -> Any:
        self._count(event, keys)
        if len(keys) > _DEEPEST:
            self._refuse(keys[:3], event, "values too deep", f"at most {_DEEPEST} levels")
        if isinstance(value, dict):
            return {key: self._copied(one, event, (*keys, key)) for key, one in value.items()}
        if isinstance(value, list):
            return [self._copied(one, event, (*keys, i)) for i, one in enumerate(value)]
        return value

    def _count(self, event: Any, keys: Keys) -> None:
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            self._refuse(keys[:3], event, "too many values", f"at most {_MOST_NODES:,}")

    def _scalar(self, event: Any, keys: Keys) -> str | int | float | bool | None:
        text = str(event.value)
        if event.tag not in (None, "!", _TEXT_TAG):
            self._refuse(keys, event, f"the tag {event.tag}", "no tags; quotes make text")
        if bad := _UNWRITABLE.search(text):
            code = f"U+{ord(bad[0]):04X}"
            self._refuse(keys, event, f"the character {code}", "text that UTF-8 can hold")
        if not event.implicit[0] or event.tag is not None:
            return text
        return self._plain(text, event, keys)

    def _plain(self, text: str, event: Any, keys: Keys) -> str | int | float | bool | None:
        """What a scalar without quotes is."""
        if text in _NULL:
            return None
        if text in _BOOLEANS:
            return _BOOLEANS[text]
        if _BASE_60.fullmatch(text):
            quotes = "quotes around it, or no colon"
            self._refuse(keys, event, f"{quoted(text)}, a number in base 60 to YAML", quotes)
        if _ZERO_FIRST.fullmatch(text):
            quotes = "quotes around text, or a number that does not begin with 0"
            self._refuse(keys, event, f"{quoted(text)}, an octal number to YAML", quotes)
        is_int = _INT.fullmatch(text)
        if (is_int or _FLOAT.fullmatch(text)) and len(text) > _LONGEST_NUMBER:
            got = f"a number of {len(text):,} characters"
            self._refuse(keys, event, got, f"at most {_LONGEST_NUMBER}")
        if is_int:
            return int(text.replace("_", ""), 0)
        if _NOT_FINITE.fullmatch(text):
            return float(text.replace(".", ""))
        return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else text

    def _refuse(self, keys: Keys, event: Any, got: str, expected: str) -> NoReturn:
        raise ConfigError(
            f"{named(keys)}: cannot be used",
            expected=expected,
            got=got,
            where=f"{self.where}:{_line(event)}",
            field=named(keys),
        )

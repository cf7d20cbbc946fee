"""`--set section.field=value`: how the value is read, and where it is put.

What the setting is decides how its value is read. A setting that is text takes the value as it
stands, so that `--set prompt.template={history}` is that template; only a value in quotes is read
without them, and `null` unsets what may be unset. Everything else is YAML. The last of two that set
the same wins.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from schemas.errors import ConfigError, quoted
from schemas.settings import json_schema
from schemas.strict_yaml import read_yaml

_NULLS = ("null", "~")


def override(raw: dict[str, Any], item: str) -> tuple[str, ...]:
    """Put one `a.b=value` into what a file says; the place where it is now.

    Raises:
        ConfigError: it cannot be read, or stands inside something that is no section.
    """
    key, equals, text = item.partition("=")
    names = tuple(part.strip() for part in key.split("."))
    if not equals or not all(names):
        raise ConfigError("--set cannot be read", expected="section.field=value", got=quoted(item))
    if "[" in key:
        raise ConfigError(
            f"--set {key}: a list is set as a whole",
            expected=f"--set {key.partition('[')[0]}=[…]",
            got=quoted(item),
        )
    *parents, leaf = names
    node = raw
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {key}: {parent!r} is not a section", got=quoted(child))
        node = child
    node[leaf] = value_of(names, text)
    return names


def value_of(names: tuple[str, ...], text: str) -> Any:
    """The value of `--set`, read as the setting asks.

    Raises:
        ConfigError: it is not YAML, where it is read as YAML.
    """
    kinds = kinds_of(names)
    where = f"--set {'.'.join(names)}"
    bare = text.strip()
    if "string" in kinds and kinds <= {"string", "null", "object"}:
        if "null" in kinds and bare in _NULLS:
            return None
        if bare[:1] in ("'", '"') and bare[-1:] == bare[:1] and len(bare) > 1:
            return _yaml(bare, where)
        if "object" in kinds and (found := _mapping(bare, where)) is not None:
            return found
        return _checked(text, where)
    return _yaml(text, where)


def _mapping(text: str, where: str) -> dict[str, Any] | None:
    """A mapping that says something: `{ds}` says nothing, and is a place in a path."""
    if not text.startswith("{"):
        return None
    try:
        found = _yaml(text, where)
    except ConfigError:
        return None
    full = isinstance(found, dict) and found and None not in found.values()
    return found if full else None


def _yaml(text: str, where: str) -> Any:
    try:
        return read_yaml(text, where).value
    except ConfigError as err:
        raise ConfigError(
            f"{where}: the value cannot be used", expected=err.expected, got=err.got or quoted(text)
        ) from None


def _checked(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: the value is not UTF-8", got=quoted(text)) from None
    return text


def kinds_of(names: tuple[str, ...]) -> set[str]:
    """What a setting may be, in the words of JSON Schema; nothing for one that is unknown."""
    options = [_schema()]
    for name in names:
        options = [
            one
            for option in options
            for one in _options(option.get("properties", {}).get(name, {}))
        ]
    return {str(option["type"]) for option in options if "type" in option}


@cache
def _schema() -> dict[str, Any]:
    return json_schema()


def _options(node: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a schema, references followed."""
    if "$ref" in node:
        return _options(_schema()["$defs"][node["$ref"].rpartition("/")[2]])
    if "anyOf" in node:
        return [one for option in node["anyOf"] for one in _options(option)]
    return [node] if node else []

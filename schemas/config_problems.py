"""Every problem of a configuration file at once, and as much of the configuration as can be used.

A setting that cannot be used is reported and taken out; what is left is read again, until it can be
read. So that the inputs can still be looked at, a required setting that is missing is replaced by a
stand-in. What was replaced is in `repaired`, and nobody may draw conclusions from it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from schemas.config_file import (
    Sources,
    allowed_keys,
    place_of,
    read_mapping,
    resolve_paths,
    said,
)
from schemas.errors import ConfigError, did_you_mean, quoted
from schemas.settings import LENIENT, RunConfig

_ROUNDS = 100  # a round takes out at least one setting
_TASKS = ("score", "generate", "label", "embed")
_STAND_INS: dict[str, Any] = {
    "surface": "surface",
    "prompt": {"template": "-"},
    "prompt.template": "-",
    "inputs": {"users": "."},
    "inputs.users": ".",
    "task": {"generate": {}},
    "output": {"path": "."},
    "output.path": ".",
}


@dataclass(frozen=True)
class ConfigReport:
    """What a configuration file says. `config` is None when nothing of it can be used."""

    config: RunConfig | None
    problems: tuple[ConfigError, ...]
    repaired: frozenset[str]
    sources: Sources

    def is_repaired(self, *settings: str) -> bool:
        """Whether any of these settings, or a part or a section of one, is not what was written."""
        return any(_touches(one, found) for one in settings for found in self.repaired)


def inspect_config(
    path: str | Path, *, overrides: list[str] | None = None, ds: str | None = None
) -> ConfigReport:
    """Read a configuration file without stopping at what is wrong with it.

    Raises:
        ConfigError: the file cannot be read as a YAML mapping, or an override cannot.
    """
    raw, sources = read_mapping(path, overrides=overrides, ds=ds)
    reader = _Reader(raw, sources)
    config = reader.read()
    if config is not None:
        config = resolve_paths(config, Path(path).resolve().parent)
    return ConfigReport(config, tuple(reader.problems), frozenset(reader.repaired), sources)


class _Reader:
    """Takes out of `raw` what cannot be used, until the rest can."""

    def __init__(self, raw: dict[str, Any], sources: Sources) -> None:
        self.raw, self.sources = raw, sources
        self.problems: list[ConfigError] = []
        self.repaired: set[str] = set()

    def read(self) -> RunConfig | None:
        for _ in range(_ROUNDS):
            try:
                config = RunConfig.model_validate(self.raw, context={LENIENT: True})
            except ValidationError as err:
                self._take_out(err.errors())
                continue
            except ConfigError as err:
                if err.field is None or not self._remove(err.field.split(".")):
                    self._add(err)
                    return None
                self._report(err, err.field)
                self.repaired.add(err.field)
                continue
            broken = list(_syntax(config))
            if not broken:
                self._add_conflicts(config)
                return config
            for error in broken:
                assert error.field is not None, "syntax errors name their setting"
                self._report(error, error.field)
                self._remove(error.field.split("."))
                self.repaired.add(error.field)
        return None

    def _report(self, error: ConfigError, name: str) -> None:
        """Keep an error, unless it only follows from what was taken out."""
        if not any(_touches(name, found) for found in self.repaired):
            self._add(error)

    def _add(self, error: ConfigError) -> None:
        error.where = error.where or self.sources.where_named(error.field)
        self.problems.append(error)

    def _take_out(self, details: list[ErrorDetails]) -> None:
        errors: dict[tuple[str, bool], tuple[list[str], list[ErrorDetails]]] = {}
        for detail in details:
            keys = self._keys(detail)
            key = (".".join(keys), detail["type"] == "missing")
            errors.setdefault(key, (keys, []))[1].append(detail)
        before = set(self.repaired)
        for (name, missing), (keys, found) in errors.items():
            detail = found[0]
            if not any(_touches(name, other) for other in before):
                error = _as_error(found, name)
                error.where = self.sources.where(place_of(detail, self.raw))
                self.problems.append(error)
            if missing:
                self._stand_in(keys)
            elif name == "task":
                self.raw["task"] = _some_task(self.raw.get("task"))
                self.repaired.add("task")
            else:
                self._remove(keys)
                if detail["type"] != "extra_forbidden":  # that changes nothing else
                    self.repaired.add(name)

    def _keys(self, detail: ErrorDetails) -> list[str]:
        """The setting an error is about: its place, without what is inside a value."""
        keys: list[str] = []
        node: Any = self.raw
        for part in detail["loc"]:
            if not isinstance(node, dict) or (part not in node and detail["type"] != "missing"):
                break
            keys.append(str(part))
            node = node.get(part)
        return keys

    def _stand_in(self, keys: list[str]) -> None:
        name = ".".join(keys)
        if name in _STAND_INS:
            parent = self._at(keys[:-1])
            parent[keys[-1]] = copy.deepcopy(_STAND_INS[name])
            self.repaired.add(name)
        else:  # a section without what it must have
            self._remove(keys[:-1])
            self.repaired.add(".".join(keys[:-1]))

    def _remove(self, keys: list[str]) -> bool:
        parent = self._at(keys[:-1])
        return bool(keys) and isinstance(parent, dict) and parent.pop(keys[-1], self) is not self

    def _at(self, keys: list[str]) -> Any:
        node: Any = self.raw
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def _add_conflicts(self, config: RunConfig) -> None:
        """Settings that do not fit together; where a whole section is gone nobody can tell."""
        if self.repaired & {"engine", "sid", "text", "prompt", "inputs", "task", "output"}:
            return
        for error in config.conflicts():
            self._report(error, error.field or "file")


def _touches(one: str, other: str) -> bool:
    """Whether two settings are the same, or one is a section of the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _some_task(task: Any) -> dict[str, Any]:
    kept = {k: v for k, v in task.items() if k not in _TASKS} if isinstance(task, dict) else {}
    return {**kept, "generate": {}}


def _syntax(config: RunConfig) -> Iterator[ConfigError]:
    """Settings that are small languages of their own, and cannot be read."""
    parsers = (
        ("prompt.template", lambda: config.prompt.parsed),
        ("task.eligibility", lambda: config.task.eligible),
        ("sid", lambda: config.sid and config.sid.space),
    )
    for field, parse in parsers:
        try:
            parse()
        except ConfigError as err:
            err.field = field
            yield err


def _as_error(details: list[ErrorDetails], name: str) -> ConfigError:
    """What pydantic says of one setting, as an error of ours."""
    detail = details[0]
    field = ".".join(str(part) for part in detail["loc"]) or "file"
    if detail["type"] == "extra_forbidden":
        allowed = allowed_keys([str(part) for part in detail["loc"][:-1]])
        key = str(detail["loc"][-1])
        return ConfigError(
            f"{field}: unknown key",
            expected=f"one of {', '.join(allowed)}",
            got=quoted(key) + did_you_mean(key, allowed),
            do="Correct the key, or take it out.",
            field=field,
        )
    if detail["type"] == "missing":
        return ConfigError(
            f"{field}: required but missing", do=f"Add {field} to the file.", field=field
        )
    message = said(details)
    expected = message.removeprefix("Input should be ") if message.startswith("Input ") else None
    return ConfigError(
        f"{name or 'file'}: " + ("cannot be used" if expected else message),
        expected=expected,
        got=quoted(detail["input"]),
        do=f"Correct {name or 'the file'}; docs/configuration.md has what it may be.",
        field=name or "file",
    )

"""Types of the settings in `surfaces.yaml`, and its loader: one check per key, in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import yaml

ON_SPARK = ("plan", "prepare", "score")
_SCHEDULES = ({"cron", "timezone", "run_offset"}, {"assets", "keys"})
_PRESETS = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@quarterly", "@yearly")
_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))  # of the fields of a cron expression
_NAMES = re.compile(r"(?i)\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|"
                    r"mon|tue|wed|thu|fri|sat|sun)\b")  # fmt: skip

_MONTH, _WEEKDAY = 3, 4
_PART = r"(\*|\d+(-\d+)?)(/[1-9]\d*)?"  # of a list in a field; days have signs of their own
_PARTS = {2: rf"{_PART}|[?Ll]", _WEEKDAY: rf"{_PART}|\?|[Ll]\d|\d#[1-5]"}
_LARGEST = 2**31  # of what Airflow's tables hold
_FARTHEST = 400  # ticks from a run to its partition: Airflow walks them, one by one, at each look

_Check = Callable[[Any], Iterator[str]]


def _text(value: Any) -> Iterator[str]:
    if not isinstance(value, str) or not value.strip():
        yield f"expected text, got {words(value)}"


def _texts(least: int = 0, among: tuple[str, ...] = ()) -> _Check:
    def check(value: Any) -> Iterator[str]:
        if not isinstance(value, list):
            yield f"expected a list, got {words(value)}"
            return
        if len(value) < least:
            yield "expected at least one word, got an empty list"
        for one in value:
            if not isinstance(one, str) or not one.strip():
                yield f"expected words, got {words(one)}"
            elif among and one not in among:
                yield f"may be {', '.join(among)}, not {one!r}"

    return check


def _number(least: float, *, whole: bool = False) -> _Check:
    def check(value: Any) -> Iterator[str]:
        right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not right or not least <= value < (_LARGEST if whole else float("inf")):
            kind = "a whole number" if whole else "a number"
            yield f"expected {kind} of at least {least:g}, got {words(value)}"

    return check


def _or_nothing(check: _Check) -> _Check:
    return lambda value: iter(()) if value is None else check(value)


def _one_of(*among: str) -> _Check:
    def check(value: Any) -> Iterator[str]:
        if value not in among:
            yield f"is {' or '.join(among)}, not {words(value)}"

    return check


def _mapping(of: tuple[type, ...] | None) -> _Check:
    def check(value: Any) -> Iterator[str]:
        if not isinstance(value, Mapping):
            yield f"expected a mapping, got {words(value)}"
            return
        yield from (f"{key} stands twice, {where}" for key, where in value.doubled)
        for key, one in value.items():
            if not isinstance(key, str):
                yield f"expected names, got {words(key)}"
            elif of is not None and (isinstance(one, bool) or not isinstance(one, of)):
                yield f"{key}: expected text, got {words(one)}; write it in quotes"

    return check


def _date(value: Any) -> Iterator[str]:
    try:
        right = not isinstance(value, datetime) and bool(date.fromisoformat(str(value)))
    except ValueError:
        right = False
    if not right:
        yield f"expected a date, YYYY-MM-DD, got {words(value)}"


def _schedule(value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"expected a mapping with cron or assets, got {words(value)}"
        return
    yield from (f"{key} stands twice, {where}" for key, where in value.doubled)
    keys = set(value)
    if not any(keys <= one and keys & {"cron", "assets"} for one in _SCHEDULES):
        yield (
            f"has {sorted(map(str, keys))}; it may have cron, timezone and run_offset, or assets "
            "and keys"
        )
        return
    for key, one in value.items():
        yield from (about(key, why) for why in _IN_SCHEDULE[key](one))


def _cron(value: Any) -> Iterator[str]:
    if value in _PRESETS:
        return
    found = value.split() if isinstance(value, str) else []
    if len(found) != len(_RANGES):
        yield f"expected five fields or one of {', '.join(_PRESETS)}, got {words(value)}"
        return
    for place, (word, (low, high)) in enumerate(zip(found, _RANGES, strict=True)):
        plain = _NAMES.sub("1", word) if place in (_MONTH, _WEEKDAY) else word
        form = _PARTS.get(place, _PART)
        right = all(re.fullmatch(form, part) for part in plain.split(","))
        numbers = [int(one) for one in re.findall(r"(?<![/#\d])\d+", plain)]
        if not right or any(not low <= n <= high for n in numbers):
            yield f"expected numbers from {low} to {high}, got {word!r} in {value!r}"


def _zone(value: Any) -> Iterator[str]:
    try:
        ZoneInfo(value)
    except (ValueError, OSError, KeyError, TypeError):  # ZoneInfoNotFoundError is a KeyError
        yield f"expected a time zone such as Europe/Berlin, got {words(value)}"


CHECKS: dict[str, _Check] = {
    "config": _text,
    "schedule": _or_nothing(_schedule),
    "ready": _texts(),
    "ready_timeout_hours": _number(0),
    "ready_every_s": _number(1),
    "command": _texts(least=1),
    "env": _mapping((str, int, float)),
    "launcher": _one_of("local", "spark"),
    "spark": _mapping(None),
    "spark_steps": _texts(among=ON_SPARK),
    "start_date": _date,
    "max_active_runs": _number(1, whole=True),
    "pool": _text,
    "pool_slots": _number(1, whole=True),
    "queue": _or_nothing(_text),
    "retries": _number(0, whole=True),
    "retry_delay_s": _number(0),
    "max_retry_delay_s": _number(0),
    "timeout_hours": _number(0.001),
    "deadline_hours": _or_nothing(_number(0)),
    "tags": _texts(),
}


def _offset(value: Any) -> Iterator[str]:
    if not isinstance(value, int) or isinstance(value, bool):
        yield f"expected a whole number, got {words(value)}"
    elif abs(value) > _FARTHEST:
        yield f"expected a whole number from -{_FARTHEST} to {_FARTHEST}, got {words(value)}"


_IN_SCHEDULE: dict[str, _Check] = {
    "cron": _cron,
    "timezone": _zone,
    "run_offset": _offset,
    "assets": _texts(least=1),
    "keys": _one_of("date", "timestamp"),
}


def about(key: str, why: str) -> str:
    """A problem with the key that it is of."""
    return f"{key}: {why}" if why.startswith("expected") or ":" in why else f"{key} {why}"


def words(value: Any) -> str:
    """A value as a problem shows it."""
    if value is None or isinstance(value, str):
        return "nothing" if value is None else repr(value[:80])
    return f"{type(value).__name__.strip('_')} {str(value)[:80]!r}"


class Mapping(dict[Any, Any]):
    """A mapping of the file, with the keys that stand in it more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled: list[tuple[Any, str]] = []


class Loader(yaml.SafeLoader):
    """Mappings remember keys that stand twice, where YAML keeps the last one."""


def _construct(loader: Loader, node: yaml.MappingNode) -> Iterator[Mapping]:
    found = Mapping()
    yield found
    lines: dict[str, int] = {}
    for key_node, _ in node.value:  # before those of `<<` are among them
        key, line = key_node.value, key_node.start_mark.line + 1
        if isinstance(key, str) and lines.setdefault(key, line) != line:
            found.doubled.append((key, f"in lines {lines[key]} and {line}"))
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool | date | None):
            key = str(key)
        found[key] = loader.construct_object(value_node, deep=True)


def _date_or_text(loader: Loader, node: yaml.ScalarNode) -> Any:
    try:
        return loader.construct_yaml_timestamp(node)
    except ValueError:  # a day that no month has: its own check says so
        return node.value


Loader.add_constructor("tag:yaml.org,2002:timestamp", _date_or_text)
Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct)


def load(path: Path) -> Any:
    """A YAML file whose mappings remember doubled keys."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader)  # noqa: S506  # a SafeLoader

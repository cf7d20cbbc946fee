"""Read a configuration file: YAML, overrides, checks, paths; every problem named at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from schemas.errors import ConfigError, did_you_mean, quoted
from schemas.overrides import override
from schemas.settings import RunConfig
from schemas.strict_yaml import LARGEST_FILE, Keys, decoded, read_yaml

S = TypeVar("S", bound=BaseModel)
_URL = re.compile(r"^[a-z][a-z0-9+.-]*://|^/|^table:")


# Settings are held against tables and folders long after the file was read; who says what was found
# then asks here where they were written.
_LAST_READ: ContextVar[Sources | None] = ContextVar("last configuration read", default=None)


@dataclass(frozen=True)
class Sources:
    """Where each setting was written: a line of the file, or an argument that won over it."""

    path: str
    lines: dict[Keys, int]
    arguments: dict[Keys, str]

    def where(self, keys: Sequence[str | int]) -> str:
        """Where a setting was written, or the section that it is missing in."""
        place = tuple(keys)
        for end in range(len(place), -1, -1):
            if (argument := self.arguments.get(place[:end])) is not None:
                return argument
            if (line := self.lines.get(place[:end])) is not None:
                return f"{self.path}:{line}"
        return self.path

    def where_named(self, field: str | None) -> str:
        """The same of `section.field`."""
        return self.where([int(k) if k.isdigit() else k for k in (field or "").split(".")])


def nothing_read_yet() -> None:
    """Another command begins in this process."""
    _LAST_READ.set(None)


def with_its_line(error: ConfigError) -> ConfigError:
    """The error with the line, or the argument, of the setting that it is about, where it names one
    of the configuration that was read last.
    """
    sources, name = _LAST_READ.get(), error.field or ""
    if sources is None or name.partition(".")[0] not in RunConfig.model_fields:
        return error
    written = sources.where_named(name)
    if written not in (error.where or ""):
        error.where = f"{error.where}; {written}" if error.where else written
    return error


def load_config(
    path: str | Path, *, overrides: list[str] | None = None, ds: str | None = None
) -> RunConfig:
    """Read, override, check and resolve a configuration file.

    Args:
        path: the YAML file; paths inside are relative to its folder.
        overrides: `a.b=value` items; schemas/overrides.py says how the value is read.
        ds: partition date that wins over the file's.

    Raises:
        ConfigError: naming the file and line, the field, what is allowed and what was found.
    """
    raw, sources = read_mapping(path, overrides=overrides, ds=ds)
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as err:
        raise _readable(err, raw, sources) from None
    except ConfigError as err:
        err.where = err.where or sources.where_named(err.field)
        raise
    return resolve_paths(config, Path(path).resolve().parent)


def read_mapping(
    path: str | Path, *, overrides: list[str] | None = None, ds: str | None = None
) -> tuple[dict[str, Any], Sources]:
    """What a configuration file says, with overrides, before it is checked.

    Raises:
        ConfigError: the file cannot be read as a YAML mapping, or an override cannot.
    """
    document = read_yaml(_text_of(Path(path)), str(path))
    raw = document.value
    if not isinstance(raw, dict):
        raise ConfigError(
            "the configuration is not a mapping",
            got="nothing" if raw is None else type(raw).__name__,
            where=f"{path}:{document.lines.get((), 1)}",
        )
    arguments: dict[Keys, str] = {}
    for item in overrides or []:
        place = override(raw, item)
        arguments[place] = f"--set {'.'.join(place)}"
    if ds is not None:
        raw["ds"] = ds
        arguments["ds",] = "--ds"
    sources = Sources(str(path), document.lines, arguments)
    _LAST_READ.set(sources)
    return raw, sources


def _text_of(file: Path) -> str:
    try:
        with file.open("rb") as handle:
            data = handle.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ConfigError("the configuration file does not exist", got=quoted(str(file))) from None
    except IsADirectoryError:
        raise ConfigError(
            "the configuration is a folder", expected="a YAML file", got=quoted(str(file))
        ) from None
    except OSError as err:
        raise ConfigError(
            "the configuration file cannot be read", got=err.strerror or str(err), where=str(file)
        ) from err
    return decoded(data, str(file))


def _readable(error: ValidationError, raw: dict[str, Any], sources: Sources) -> ConfigError:
    found: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors():
        found.setdefault(tuple(map(str, place_of(detail, raw))), []).append(detail)
    problems = {
        place: (_problem(place, details), sources.where(place_of(details[0], raw)))
        for place, details in found.items()
    }
    if len(problems) == 1:
        place, (problem, where) = next(iter(problems.items()))
        return ConfigError(f"configuration: {problem}", where=where, field=".".join(place) or None)
    lines = "".join(f"\n  - {problem} ({where})" for problem, where in problems.values())
    return ConfigError(f"configuration has {len(problems)} problems{lines}\n", where=sources.path)


def place_of(detail: ErrorDetails, raw: dict[str, Any]) -> Keys:
    """The setting an error is about, without the alternatives of a type that pydantic names too."""
    keys: list[str | int] = []
    node: Any = raw
    for part in detail["loc"]:
        if isinstance(node, dict) and (part in node or detail["type"] == "missing"):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            break
        keys.append(part)
    return tuple(keys)


def _problem(place: tuple[str, ...], details: list[ErrorDetails]) -> str:
    name, detail = ".".join(place), details[0]
    if detail["type"] == "extra_forbidden":
        allowed = allowed_keys(list(place[:-1]))
        near = did_you_mean(place[-1], allowed)
        return f"{name}: unknown key{near} (allowed: {', '.join(allowed)})"
    if detail["type"] == "missing":
        return f"{name}: required but missing"
    message = said(details)
    if not place:
        return message
    return f"{name}: {message[:1].lower()}{message[1:]}, got {quoted(detail['input'])}"


def said(details: list[ErrorDetails]) -> str:
    """What pydantic says of one setting, in one sentence."""
    messages = dict.fromkeys(detail["msg"].removeprefix("Value error, ") for detail in details)
    first, *others = messages
    text = ", or ".join([first, *(one.removeprefix("Input should be ") for one in others)])
    wants_text = any(detail["type"] in ("string_type", "literal_error") for detail in details)
    value = details[0]["input"]
    if wants_text and isinstance(value, bool):
        text += "; YAML reads yes, no, on, off, true and false as booleans: put it in quotes"
    elif wants_text and isinstance(value, int | float):
        text += "; put it in quotes"
    return text


def allowed_keys(loc: list[str]) -> list[str]:
    """Keys of the section at `loc`; none where there is no such section."""
    section = _section_at(loc)
    return sorted(section.model_fields) if section is not None else []


def _section_at(loc: list[str]) -> type[BaseModel] | None:
    section: type[BaseModel] = RunConfig
    for part in loc:
        field = section.model_fields.get(part)
        if field is None:
            return None
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        found = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if not found:
            return None
        section = found[0]
    return section


def _output_paths(config: RunConfig) -> tuple[str, ...]:
    """Settings of `output` that are paths; an Iceberg table has a name."""
    return ("path",) if config.output.format == "iceberg" else ("path", "quarantine")


def resolve_paths(config: RunConfig, base: Path) -> RunConfig:
    """The configuration with `{ds}` and `{surface}` filled in, and paths taken from `base`."""

    def fill(value: str, quote: Callable[[str], str]) -> str:
        value = value.replace("{surface}", quote(config.surface))
        if config.ds is not None:
            value = value.replace("{ds}", config.ds)
        return value if _URL.match(value) else str(base / value)

    def full(value: str | None) -> str | None:
        return None if value is None else fill(value, str)

    def rebased(section: S, *names: str) -> S:
        return section.model_copy(update={n: full(getattr(section, n)) for n in names})

    return config.model_copy(
        update={
            "engine": rebased(config.engine, "model", "projector"),
            "inputs": config.inputs.placed(fill),
            "output": rebased(config.output, *_output_paths(config)),
            "run": rebased(config.run, "work_dir", "metrics_dir"),
        }
    )

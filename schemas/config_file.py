"""Read a configuration file: YAML, overrides, checks, paths; every problem named at once."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from schemas.errors import ConfigError, did_you_mean, quoted
from schemas.settings import RunConfig

S = TypeVar("S", bound=BaseModel)
_URL = re.compile(r"^[a-z][a-z0-9+.-]*://|^/|^table:")


def load_config(
    path: str | Path, *, overrides: list[str] | None = None, ds: str | None = None
) -> RunConfig:
    """Read, override, check and resolve a configuration file.

    Args:
        path: the YAML file; paths inside are relative to its folder.
        overrides: `a.b=value` items, the value in YAML.
        ds: partition date that wins over the file's.

    Raises:
        ConfigError: naming the file, the field, what is allowed and what was found.
    """
    raw = read_mapping(path, overrides=overrides, ds=ds)
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as err:
        raise _readable(err, str(path)) from None
    except ConfigError as err:
        err.where = err.where or str(path)
        raise
    return resolve_paths(config, Path(path).resolve().parent)


def read_mapping(
    path: str | Path, *, overrides: list[str] | None = None, ds: str | None = None
) -> dict[str, Any]:
    """What a configuration file says, with overrides, before it is checked.

    Raises:
        ConfigError: the file cannot be read as a YAML mapping, or an override cannot.
    """
    file = Path(path)
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("the configuration file does not exist", got=quoted(str(path))) from None
    except IsADirectoryError:
        raise ConfigError(
            "the configuration is a folder", expected="a YAML file", got=quoted(str(path))
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
        raise ConfigError(
            "the configuration file cannot be read", got=" ".join(str(err).split()), where=str(path)
        ) from err
    if not isinstance(raw, dict):
        raise ConfigError(
            "the configuration is not a mapping", got=type(raw).__name__, where=str(path)
        )
    if isinstance(raw.get("ds"), dt.date):
        raw["ds"] = raw["ds"].isoformat()
    for item in overrides or []:
        _override(raw, item)
    if ds is not None:
        raw["ds"] = ds
    return raw


def _override(raw: dict[str, Any], item: str) -> None:
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError("--set cannot be read", expected="section.field=value", got=quoted(item))
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {key}: {parent!r} is not a section", got=quoted(child))
        node = child
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as err:
        raise ConfigError(f"--set {key}: the value is not YAML", got=quoted(text)) from err
    if isinstance(node[leaf], dt.date):
        node[leaf] = node[leaf].isoformat()


def _readable(error: ValidationError, where: str) -> ConfigError:
    problems = list(dict.fromkeys(_problem(detail) for detail in error.errors()))
    if len(problems) == 1:
        return ConfigError(f"configuration: {problems[0]}", where=where)
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return ConfigError(f"configuration has {len(problems)} problems{lines}\n", where=where)


def _problem(detail: ErrorDetails) -> str:
    loc = [str(part) for part in detail["loc"]]
    name = ".".join(loc) or "file"
    if detail["type"] == "extra_forbidden":
        allowed = allowed_keys(loc[:-1])
        return (
            f"{name}: unknown key{did_you_mean(loc[-1], allowed)} (allowed: {', '.join(allowed)})"
        )
    if detail["type"] == "missing":
        return f"{name}: required but missing"
    message = detail["msg"].removeprefix("Value error, ")
    if not loc:
        return message
    return f"{name}: {message[:1].lower()}{message[1:]}, got {quoted(detail['input'])}"


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

    def full(value: str | None) -> str | None:
        if value is None:
            return None
        value = value.replace("{surface}", config.surface)
        if config.ds is not None:
            value = value.replace("{ds}", config.ds)
        return value if _URL.match(value) else str(base / value)

    def rebased(section: S, *names: str) -> S:
        return section.model_copy(update={n: full(getattr(section, n)) for n in names})

    return config.model_copy(
        update={
            "engine": rebased(config.engine, "model", "projector"),
            "inputs": rebased(config.inputs, *config.inputs.paths),
            "output": rebased(config.output, *_output_paths(config)),
            "run": rebased(config.run, "work_dir", "metrics_dir"),
        }
    )

"""Packages that come with an extra: a run does without, and what asks for them says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from schemas.errors import ConfigError
from schemas.settings import RunConfig

_PACKAGES = {"report": ("jinja2", "matplotlib"), "metrics": ("prometheus_client",)}


def missing_extra(extra: str, purpose: str, field: str | None = None) -> ConfigError | None:
    """The error of a purpose whose packages are not installed; None where they are."""
    missing = [name for name in _PACKAGES[extra] if find_spec(name) is None]
    if not missing:
        return None
    return ConfigError(
        f"{purpose} needs packages that are not installed",
        expected=", ".join(_PACKAGES[extra]),
        got=f"no {', '.join(missing)}",
        do=f"Install them: pip install -c constraints.txt -e '.[{extra}]'.",
        field=field,
    )


def missing_for(config: RunConfig) -> Iterator[ConfigError]:
    """An error for each setting that asks for what is not installed."""
    if config.run.metrics_dir is not None:
        error = missing_extra("metrics", "a Prometheus textfile", field="run.metrics_dir")
        if error is not None:
            yield error

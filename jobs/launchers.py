"""Launchers by name, for `run.launcher` and `--launcher`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.running.launcher import Launcher
from schemas.errors import ConfigError, quoted
from schemas.settings import RunConfig

# What gives each launcher, or a context manager around it. Loaded when it is chosen.
LAUNCHERS = {
    "local": "jobs.local.launcher:LocalLauncher",
    "spark": "jobs.spark.launch:open_spark",
}

if TYPE_CHECKING:
    LauncherName = str
else:  # so that the command line knows the choices
    LauncherName = StrEnum("LauncherName", {name: name for name in LAUNCHERS})

LauncherOption = Annotated[
    LauncherName | None,
    typer.Option("--launcher", help="Who runs the shards; default: the file's run.launcher."),
]


@contextmanager
def open_launcher(name: str | None, config: RunConfig) -> Iterator[Launcher]:
    """The launcher, until the end of the block. Spark itself starts when it is first needed.

    Raises:
        ConfigError: there is none of the name that the configuration says.
    """
    name = name or config.run.launcher
    if name not in LAUNCHERS:
        raise ConfigError(
            "run.launcher is not known",
            expected=" or ".join(LAUNCHERS),
            got=quoted(name),
            field="run.launcher",
        )
    opened = resolve_name(LAUNCHERS[name])()
    with opened if isinstance(opened, AbstractContextManager) else nullcontext(opened) as launcher:
        yield launcher

"""Which launcher a command uses: the option, else the configuration's `run.launcher`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer

from jobs.local.processes import LocalLauncher
from jobs.running.launcher import Launcher
from schemas.settings import RunConfig


class LauncherName(StrEnum):
    """Who runs the shards."""

    local = "local"
    spark = "spark"


LauncherOption = Annotated[
    LauncherName | None,
    typer.Option("--launcher", help="Who runs the shards; default: the file's run.launcher."),
]


@contextmanager
def open_launcher(name: LauncherName | None, config: RunConfig) -> Iterator[Launcher]:
    """The launcher, until the end of the block. Spark itself starts when it is first needed."""
    if (name or LauncherName(config.run.launcher)) is LauncherName.local:
        yield LocalLauncher()
        return
    from jobs.spark.launch import SparkLauncher
    from jobs.spark.session import SparkApp

    with SparkApp() as app:
        yield SparkLauncher(app)

"""The calls. Each loads what it needs when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from nightshelf.own_packages import foreign_packages

if TYPE_CHECKING:
    from pipelines.preflight import Findings
    from schemas.runs import RunManifest, RunPlan


def validate(
    config: str | PathLike[str], *, ds: str | None = None, overrides: Sequence[str] = ()
) -> Findings:
    """Everything that is wrong with a configuration and its inputs; raises nothing for it.

    Args:
        config: the YAML file.
        ds: the partition date; wins over the file.
        overrides: settings as `--set` takes them, `task.k=50`.

    Raises:
        ImportError: another project's package with a name of ours is imported here already.
    """
    _check_packages()
    from pipelines.preflight import preflight

    return preflight(str(config), overrides=list(overrides), ds=ds)


def plan(
    config: str | PathLike[str], *, ds: str | None = None, overrides: Sequence[str] = ()
) -> RunPlan:
    """What a run would do: its inputs as files, its shards and its folder. Nothing is written.

    Args: as `validate`.

    Raises:
        NightshelfError: what is wrong first, with what to do; of `schemas.errors`.
        ImportError: as `validate`.
    """
    _check_packages()
    from jobs.launchers import open_launcher
    from pipelines.planning.plan import plan_run
    from schemas.config_file import load_config

    settings = load_config(str(config), overrides=list(overrides), ds=ds)
    with open_launcher(None, settings) as launcher:
        return plan_run(launcher.locate(settings))


def run(
    config: str | PathLike[str], *, ds: str | None = None, overrides: Sequence[str] = ()
) -> RunManifest:
    """Plan, score, audit, publish and report one run, or continue it. Says nothing on the way.

    With worker processes (`run.workers` is not 0) the caller's main module is imported again in
    each of them: call this below `if __name__ == "__main__":`, and import nightshelf above it.

    Args: as `validate`.

    Raises:
        NightshelfError: why nothing is published; `err.retryable`: the same call may continue it.
        ImportError: as `validate`.
    """
    _check_packages()
    from rich.console import Console

    from jobs.cli.progress import LineProgress
    from jobs.launchers import open_launcher
    from jobs.running.run import run_job
    from schemas.config_file import load_config

    settings = load_config(str(config), overrides=list(overrides), ds=ds)
    with open_launcher(None, settings) as launcher:
        return run_job(settings, launcher, LineProgress(Console(quiet=True)))


def _check_packages() -> None:
    if foreign := foreign_packages():
        raise ImportError(
            f"nightshelf needs the package names {', '.join(foreign)}, which another project's "
            "packages have in this process. Call it in a process of its own, or use the command"
        )

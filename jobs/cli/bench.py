"""`nightshelf bench`: the benchmarks of the checkout, in a process of their own.

They are not part of the installed package: they bring peers, and peers bring their libraries. This
command finds them beside the sources and passes everything on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.options import guarded
from schemas.errors import ConfigError

BENCH_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
_ROOT = Path(__file__).resolve().parents[2]


@guarded
def bench(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes without vLLM, a few minutes.")
    ] = False,
) -> None:
    """Time the engine beside its peers on this machine.

    The last line of stdout is JSON.

    Everything else is passed on: `nightshelf bench -- --help` lists it.
    """
    if code := _run([*context.args, *(["--quick"] * quick)]):
        raise typer.Exit(code)


def _run(arguments: list[str]) -> int:
    """The exit code: 1 when a peer's answers differ, so that nothing was timed."""
    if not (_ROOT / "benchmarks" / "__main__.py").is_file():
        raise ConfigError(
            "the benchmarks are not here",
            expected="a checkout of the sources, where `benchmarks` lies beside `jobs`",
            got=f"an installed package in {_ROOT}",
            do="Clone the repository, run `make setup`, then `make bench`.",
        )
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], env=environment, check=False
    ).returncode

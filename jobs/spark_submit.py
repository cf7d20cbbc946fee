"""What spark-submit runs: the `nightshelf` command with Spark as its launcher.

    spark-submit --master … jobs/spark_submit.py run CONFIG --ds 2026-11-28

Every command of `nightshelf` works; those that can use executors get `--launcher spark`. In client
mode the exit code of spark-submit is the command's.
"""

import signal
import sys

if not __package__ and sys.path[0].rstrip("/").endswith("jobs"):
    # As a script its own folder comes first on the path; our packages are in the one above.
    sys.path[0] = sys.path[0].rstrip("/").removesuffix("jobs") or "."

import nightshelf.__main__  # noqa: F401  # first: it makes our packages win
from jobs.cli.app import app
from jobs.running.ending import end_with_parent

_WITH_LAUNCHER = ("validate", "run", "plan", "prepare", "score", "audit", "publish", "backfill")


def with_launcher(arguments: list[str]) -> list[str]:
    """The arguments, with `--launcher spark` where the command takes it and nobody chose."""
    chosen = any(word == "--launcher" or word.startswith("--launcher=") for word in arguments)
    if not arguments or arguments[0] not in _WITH_LAUNCHER or chosen:
        return arguments
    return [arguments[0], "--launcher", "spark", *arguments[1:]]


if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)  # who ends spark-submit ends the command, and no half of it
    app(with_launcher(sys.argv[1:]), prog_name="nightshelf")

"""Run the command line and die at the n-th change of a file below a folder, as if the power went.

    python -m tests.killer FOLDER N nightshelf-arguments…

With NIGHTSHELF_TEST_SIGNAL=SIGTERM it is that signal: somebody asks the command to end, there.

Counts Python's own audit events for opening to write, renaming, removing and making folders; with N
0 nobody dies and the count is printed as the last line of stderr.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

_seen = 0


def _watch(folder: str, kill_at: int) -> None:
    def hook(event: str, args: tuple[Any, ...]) -> None:
        global _seen
        if not _changes_a_file(event, args) or folder not in str(args[0]):
            return
        _seen += 1
        if _seen == kill_at:
            name = os.environ.get("NIGHTSHELF_TEST_SIGNAL", "SIGKILL")
            os.kill(os.getpid(), signal.Signals[name])

    sys.addaudithook(hook)


def _changes_a_file(event: str, args: tuple[Any, ...]) -> bool:
    if event == "open":
        mode, flags = args[1], args[2]
        writes = isinstance(mode, str) and any(char in mode for char in "wxa+")
        return writes or bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))
    return event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def main() -> None:
    folder, kill_at, *arguments = sys.argv[1:]
    from jobs.cli.app import app

    _watch(folder, int(kill_at))
    try:
        app(arguments, prog_name="nightshelf")
    finally:
        sys.stderr.write(f"{_seen}\n")


if __name__ == "__main__":
    main()

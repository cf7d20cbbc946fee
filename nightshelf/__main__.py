"""The `nightshelf` command: by its script, by `python -m nightshelf`, or by this file's path."""

import os
import sys
from pathlib import Path
from typing import NoReturn

_HERE = str(Path(__file__).parent)
if sys.path[0] == _HERE:  # by its path: this folder's modules are nobody's top-level modules
    sys.path[0] = os.getcwd()  # as `python -m` has it
    sys.path.append(str(Path(_HERE).parent))  # last: only where nothing else has nightshelf

from nightshelf.own_packages import forget_foreign_packages  # noqa: E402  # found only now

forget_foreign_packages()  # imported when Python started, by a .pth file or sitecustomize


def main() -> NoReturn:
    """Run the command line; leaves by SystemExit with the command's exit code."""
    from jobs.cli.app import main as run_command_line

    run_command_line()


if __name__ == "__main__":  # processes that engines start import this module
    main()

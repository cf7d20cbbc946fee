"""Our packages have common names: they are found beside this one, whatever stands on the path.

Another project's `jobs` or `schemas` in the current folder, on PYTHONPATH or in a zip of Spark's
would be imported in their place. The order of `sys.path` stays as it is, since other packages are
meant to be found by it; a finder of our own answers first, and for our names alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PACKAGES = ("schemas", "engine", "pipelines", "jobs")
_ROOT = str(Path(__file__).parents[1])  # a checkout, site-packages, or a zip


class _Finder:
    """Finds our packages; their modules are found by the packages' own paths, as always."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a package of ours is; None for all other names."""
        return PathFinder.find_spec(name, [_ROOT]) if name in PACKAGES else None


def prefer_our_packages() -> None:
    """Import our packages from here in this process; where that is done already, do nothing."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def call(function: Callable[..., None], *arguments: object) -> None:
    """`function(*arguments)`, as the target of a process that is spawned.

    Such a process reads its target and then the arguments, before any code of ours has run: so the
    target's module must be this one, which makes the arguments' modules ours.
    """
    function(*arguments)


def foreign_packages() -> list[str]:
    """Names of ours under which another project's package is imported already."""
    loaded = {name: sys.modules[name] for name in PACKAGES if name in sys.modules}
    return [name for name, module in loaded.items() if not _is_ours(module)]


def _is_ours(module: ModuleType) -> bool:
    folders = (Path(folder).resolve() for folder in getattr(module, "__path__", ()))
    return Path(_ROOT).resolve() in {folder.parent for folder in folders}


def forget_foreign_packages() -> None:
    """Forget other projects' packages of our names: for processes that are ours alone."""
    for name in foreign_packages():
        for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[module]

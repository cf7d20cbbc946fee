"""What is wrong with `surfaces.yaml`, as an import error of its own.

A DAG file that raises loses all of its DAGs, those of surfaces that are right too. So this file,
which has none, says what is wrong, and `nightshelf_precompute` makes the DAGs of the others. (The
dag processor reads files that name airflow and dag.)
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
if str(_HERE) not in sys.path:  # Airflow adds a bundle's root only, and this may be a folder in it
    sys.path.append(str(_HERE))

from nightshelf_surfaces import surfaces_and_problems, surfaces_file  # noqa: E402  # found only now

_, _problems = surfaces_and_problems(surfaces_file())
if _problems:
    raise ValueError("\n".join(_problems))

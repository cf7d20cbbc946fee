"""nightshelf from Python: what the commands of these names do, as calls.

    import nightshelf

    plan = nightshelf.plan("my.yaml", ds="2026-11-28")
    manifest = nightshelf.run("my.yaml", ds="2026-11-28")

Importing it loads nothing heavy, and makes the names `jobs`, `pipelines`, `engine` and `schemas`
mean ours in this process and in those that it spawns.
"""

from nightshelf.api import plan, run, validate
from nightshelf.own_packages import prefer_our_packages

__all__ = ["plan", "run", "validate"]

prefer_our_packages()

"""The catalog of items: readers of its layouts, its checks, and the saved form that workers map.

`items` opens it as a run's configuration names it; `build` reads, checks and saves it once per run.
"""

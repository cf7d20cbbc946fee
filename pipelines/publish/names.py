"""Names of a partition: in a path, and of what lies beside the table."""

from __future__ import annotations

from urllib.parse import quote, unquote

from pipelines.shards.profile import table_key
from pipelines.storage import files
from schemas.runs import RunPlan

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"  # what Hive, Spark and pyarrow read as null


def partition_name(ds: str, surface: str) -> str:
    """`ds=…/surface=…`, values escaped as Hive does (URL-quoted)."""
    return f"ds={quote(ds, safe='')}/surface={quote(surface, safe=' ')}"


def date_of(name: str) -> str | None:
    """The date of a folder `ds=…`; None for other names."""
    return unquote(name.removeprefix("ds=")) if name.startswith("ds=") else None


def record_path(plan: RunPlan) -> str:
    """A name of the partition's own in the work folder; the lock of its runs is beside it.

    Tables that share a work folder have names of their own.
    """
    table = files.hash_bytes(table_key(plan.config).encode())[:8]
    name = f"{partition_name(plan.ds, plan.surface)}-{table}".replace("/", "-")
    return files.join(plan.config.run.work_dir, "published", f"{name}.json")


def pointer_root(path: str) -> str:
    """Where the pointers of a Parquet table are: beside its root, `<output.path>.current`."""
    return f"{path.rstrip('/')}.current"

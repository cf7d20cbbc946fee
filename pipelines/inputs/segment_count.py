"""Segments of `task.eligibility` that a shard will have, counted before anything is prepared.

Each combination of the users columns that a rule compares with is a segment, with a mask over all
items. Users are read only where there could be too many.
"""

from __future__ import annotations

import polars as pl

from pipelines.inputs import eligibility
from pipelines.inputs.prepare import SHARD, shard_column
from pipelines.inputs.shard_columns import scan
from pipelines.sources.frames import reading
from schemas.eligibility import user_columns
from schemas.runs import InputTable
from schemas.settings import RunConfig


def check_segment_count(
    config: RunConfig, users: InputTable, num_items: int, num_shards: int
) -> None:
    """Refuse a run of which a shard has more segments than memory has room for.

    Args:
        num_items: items of the catalog.
        num_shards: shards that the users are cut into.

    Raises:
        TableError: it has; or a file of users cannot be read.
    """
    rule = config.task.eligible
    names = list(user_columns(rule)) if rule is not None else []
    if not names or users.rows * num_items <= eligibility.most_cells():
        return
    frames = []
    for at, file in enumerate(users.files):
        shard = shard_column(num_shards)
        if config.inputs.self_contained:
            shard = pl.lit(at, dtype=pl.Int32).alias(SHARD)
        frames.append(scan(file.path).select(shard, *names).drop_nulls(names))
    with reading("users", [file.path for file in users.files]):
        segments = pl.concat(frames, how="vertical_relaxed").unique()
        counts = segments.group_by(SHARD).len().collect(engine="streaming")
    most = int(counts["len"].max() or 0)  # type: ignore[arg-type]  # a count
    if most * num_items > eligibility.most_cells():
        raise eligibility.too_many_segments(most, num_items, names)

"""Split the ratings by time: each user's last 20 % are held out.

Reads  raw/ml-100k.inter
Writes train.parquet, test.parquet: user_id, item_id, timestamp; a user's rows in time order
"""

from __future__ import annotations

import polars as pl
from common import arguments, read_build, run_step, say

HELD_OUT_PERCENT = 20


def main() -> None:
    """Run the step."""
    build = read_build(arguments(__doc__))
    ratings = (
        pl.read_csv(
            build.raw / "ml-100k.inter",
            separator="\t",
            new_columns=["user_id", "item_id", "rating", "timestamp"],
            infer_schema=False,  # ids are names, not numbers: "007" and "7" are two users
        )
        .with_columns(pl.col("timestamp").cast(pl.Float64).cast(pl.Int64))
        # Any rating counts as "watched". Many ratings of a session share one second; the item id
        # breaks the tie, so that the split is the same everywhere.
        .sort("user_id", "timestamp", pl.col("item_id").cast(pl.Int64))
        .select("user_id", "item_id", "timestamp")
        .with_columns(place=pl.int_range(pl.len()).over("user_id"), total=pl.len().over("user_id"))
    )
    is_train = pl.col("place") < pl.col("total") - pl.col("total") * HELD_OUT_PERCENT / 100
    train = ratings.filter(is_train).drop("place", "total")
    test = ratings.filter(~is_train).drop("place", "total")
    train.write_parquet(build.table("train"))
    test.write_parquet(build.table("test"))
    say(f"split: {train.height:,} ratings to train on, {test.height:,} held out")


if __name__ == "__main__":
    run_step(main)

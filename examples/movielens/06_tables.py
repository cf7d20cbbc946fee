"""Write the tables nightshelf reads, and the held-out films that the demo measures against.

Reads  train.parquet, test.parquet, catalog.parquet, embeddings.npz
Writes users.parquet       user_id, embedding (64 float32), history (list of item_id), segment
       candidates.parquet  user_id, item_ids: 100 films to score for each user
       exclusions.parquet  user_id, item_id: films watched, which are not to be shown again
       truth.parquet       user_id, item_id: films watched afterwards; nightshelf never reads it
"""

from __future__ import annotations

import numpy as np
import polars as pl
from common import SEED, Build, arguments, read_build, run_step, say

CANDIDATES = 100
FROM_SVD = 60  # the best films the user has not watched, by the SVD
FROM_POPULAR = 20  # then the most popular ones not watched yet; the rest is drawn at random


def main() -> None:
    """Run the step."""
    build = read_build(arguments(__doc__))
    train = pl.read_parquet(build.table("train"))
    with np.load(build.embeddings) as file:
        vectors = pl.DataFrame(
            {"user_id": file["user_ids"], "embedding": file["users"]},
            schema_overrides={"embedding": pl.Array(pl.Float32, file["users"].shape[1])},
        )
    history = train.group_by("user_id", maintain_order=True).agg(history="item_id")

    users = vectors.join(history, on="user_id", how="left", maintain_order="left")
    users = users.with_columns(segment=segment_of(pl.col("history").list.len()))
    users.write_parquet(build.table("users"))
    candidates(build, users).write_parquet(build.table("candidates"))
    train.select("user_id", "item_id").write_parquet(build.table("exclusions"))
    pl.read_parquet(build.table("test")).select("user_id", "item_id").write_parquet(
        build.table("truth")
    )
    say(f"tables: {users.height:,} users, {CANDIDATES} candidates each")


def segment_of(watched: pl.Expr) -> pl.Expr:
    """How active a user is; roughly a third of the users each."""
    level = pl.when(watched <= 35).then(pl.lit("light")).when(watched <= 90).then(pl.lit("regular"))
    return level.otherwise(pl.lit("heavy"))


def candidates(build: Build, users: pl.DataFrame) -> pl.DataFrame:
    """What another system would hand over: films worth scoring, in no order that matters.

    A few of the random films have been watched already; the exclusions take them out in the run.
    """
    catalog = pl.read_parquet(build.table("catalog"))
    item_ids = catalog["item_id"].to_numpy()
    index = {item_id: row for row, item_id in enumerate(item_ids)}
    popular = np.argsort(-catalog["popularity"].to_numpy(), kind="stable")
    with np.load(build.embeddings) as file:
        svd_scores = file["users"] @ file["items"].T
    draw = np.random.default_rng(SEED)

    lists = []
    for scores, history in zip(svd_scores, users["history"], strict=True):
        taken = {index[item_id] for item_id in history}
        chosen: list[int] = []
        sources = (
            (np.argsort(-scores, kind="stable"), FROM_SVD),
            (popular, FROM_SVD + FROM_POPULAR),
        )
        for ranking, until in sources:
            fresh = [row for row in ranking.tolist() if row not in taken]
            chosen += fresh[: until - len(chosen)]
            taken |= set(chosen)
        at_random = draw.permutation(len(item_ids)).tolist()
        chosen_before = set(chosen)
        chosen += [row for row in at_random if row not in chosen_before][: CANDIDATES - len(chosen)]
        lists.append([str(item_ids[row]) for row in sorted(chosen)])
    return pl.DataFrame({"user_id": users["user_id"], "item_ids": lists})


if __name__ == "__main__":
    run_step(main)

"""Make user and item vectors: a truncated singular value decomposition of who watched what.

Reads  train.parquet, raw/ml-100k.item
Writes embeddings.npz: user_ids, users [943, 64], item_ids, items [1682, 64], axis_weights [64]

This stands for the embeddings you already have, from a two-tower model or anything else.
A user's vector is the sum of the vectors of the films watched, scaled to one length for everybody.
That makes `users @ items.T` the SVD's own recommendation, and it lets the training step make the
vector a user had at an earlier moment.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from common import EMBEDDING_DIM, arguments, read_build, read_films, run_step, say, user_vector
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds


def main() -> None:
    """Run the step."""
    build = read_build(arguments(__doc__))
    train = pl.read_parquet(build.table("train"))
    item_ids = read_films(build)["item_id"].to_list()
    user_ids = sorted(train["user_id"].unique().to_list(), key=int)
    rows = np.searchsorted(np.array(user_ids, dtype=int), train["user_id"].cast(pl.Int64))
    columns = np.searchsorted(np.array(item_ids, dtype=int), train["item_id"].cast(pl.Int64))

    watched = csr_matrix((np.ones(len(rows)), (rows, columns)), (len(user_ids), len(item_ids)))
    # The starting vector is given, or svds would draw a random one.
    _, strength, axes = svds(watched, k=EMBEDDING_DIM, v0=np.ones(min(watched.shape)))
    order = np.argsort(-strength)
    items = axes[order].T
    # The sign of an axis is arbitrary: make its largest entry positive.
    items *= np.sign(items[np.abs(items).argmax(axis=0), np.arange(EMBEDDING_DIM)])
    users = np.stack([user_vector(items[row.indices]) for row in watched])

    np.savez(
        build.embeddings,
        user_ids=np.array(user_ids),
        users=users,
        item_ids=np.array(item_ids),
        items=items.astype(np.float32),
        axis_weights=strength[order].astype(np.float32),
    )
    say(f"embed: {len(users):,} users and {len(items):,} films, {EMBEDDING_DIM} numbers each")


if __name__ == "__main__":
    run_step(main)

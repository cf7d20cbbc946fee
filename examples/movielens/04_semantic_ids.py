"""Give every film a semantic ID: three codes of 32, by residual k-means.

Reads  embeddings.npz, train.parquet, raw/ml-100k.item
Writes catalog.parquet: item_id, sid (list<int32>), popularity, title, text, genres, year

Level one names the nearest of 32 centres; level two describes what is left after taking that centre
away; level three what is left after both. Films that look alike share the first codes, and some
share all three: nightshelf calls that a collision and returns each of them.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from common import CODES, LEVELS, SEED, arguments, read_build, read_films, run_step, say
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

LENGTH_POWER = 0.25  # 1 keeps the lengths, 0 makes them all equal

Matrix = NDArray[np.float64]


def main() -> None:
    """Run the step."""
    build = read_build(arguments(__doc__))
    counts = pl.read_parquet(build.table("train")).group_by("item_id").agg(popularity=pl.len())
    films = read_films(build).join(counts, on="item_id", how="left", maintain_order="left")
    films = films.with_columns(pl.col("popularity").fill_null(0).cast(pl.Int64))
    watched = films["popularity"].to_numpy() > 0

    with np.load(build.embeddings) as file:
        vectors = file["items"].astype(np.float64) * file["axis_weights"]
    vectors = compress(vectors)
    vectors[~watched] = guess_from_genres(films["genres"].to_list(), vectors, watched)
    sids = residual_kmeans(vectors, watched)

    catalog = films.with_columns(sid=pl.Series(sids.tolist(), dtype=pl.List(pl.Int32)))
    columns = ["item_id", "sid", "popularity", "title", "text", "genres", "year"]
    catalog.select(columns).write_parquet(build.table("catalog"))
    distinct = len(np.unique(sids, axis=0))
    say(f"semantic_ids: {distinct:,} distinct semantic IDs for {catalog.height:,} films")


def compress(vectors: Matrix) -> Matrix:
    """Bring lengths nearer to each other: a direction is a taste, a length is mostly popularity.

    With the lengths as they are, the codes tell popular films apart and little else. With one
    length for all, many codes go to films that hardly anybody watches, and popular films collide.
    """
    length = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    return vectors / length * length**LENGTH_POWER


def guess_from_genres(
    genres: list[list[str]], vectors: Matrix, watched: NDArray[np.bool_]
) -> Matrix:
    """Vectors of the films nobody watched: the mean over their genres' mean vectors."""
    names = sorted({genre for film in genres for genre in film})
    has = np.array([[name in film for name in names] for film in genres], dtype=np.float64)
    of_genre = has[watched].T @ vectors[watched]
    of_genre /= np.maximum(has[watched].sum(axis=0), 1)[:, None]
    new = has[~watched]
    return (new @ of_genre) / np.maximum(new.sum(axis=1, keepdims=True), 1)


def residual_kmeans(vectors: Matrix, watched: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Codes `[items, levels]`; the centres are fitted on watched films only."""
    rest = vectors.copy()
    codes = np.zeros((len(vectors), len(LEVELS)), dtype=np.int32)
    for level in range(len(LEVELS)):
        # One thread: with more, sums are added up in whatever order the threads finish.
        with threadpool_limits(1):
            kmeans = KMeans(CODES, n_init=4, random_state=SEED).fit(rest[watched])
        codes[:, level] = kmeans.predict(rest)
        rest -= kmeans.cluster_centers_[codes[:, level]]
    return codes


if __name__ == "__main__":
    run_step(main)

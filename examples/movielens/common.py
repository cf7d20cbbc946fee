"""What the steps share: the build folder's layout, the sizes of the example, progress lines.

Every step is a script that takes `--build DIR`, reads files below it and writes others. Nothing is
handed over in memory, so each step can be replaced by yours as long as its files look the same.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
DS = "1998-04-23"  # the last rating is of 1998-04-22, so this is the night after it
SEED = 7

EMBEDDING_DIM = 64
LEVELS = ("a", "b", "c")  # one letter per level: the token of code 5 on level 1 is <a_5>
CODES = 32  # codes per level
HISTORY_ITEMS = 30  # must equal prompt.history_max_items in generate.yaml and score.yaml


class StepError(Exception):
    """A step cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Build:
    """Paths of the build folder."""

    root: Path

    @property
    def raw(self) -> Path:
        """The data set as downloaded."""
        return self.root / "raw"

    def table(self, name: str) -> Path:
        """A Parquet file of the build folder."""
        return self.root / f"{name}.parquet"

    @property
    def embeddings(self) -> Path:
        """User and item vectors."""
        return self.root / "embeddings.npz"

    @property
    def model(self) -> Path:
        """The Hugging Face checkpoint."""
        return self.root / "model"

    @property
    def projector(self) -> Path:
        """The projector of the user vector."""
        return self.root / "projector"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows `--build`; the description is the first line of a docstring."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument(
        "--build", type=Path, default=HERE / "build", metavar="DIR", help="default: %(default)s"
    )
    return parser


def read_films(build: Build) -> pl.DataFrame:
    """The films as downloaded, by number: item_id, title, year, genres, text."""
    films = pl.read_csv(
        build.raw / "ml-100k.item",
        separator="\t",
        new_columns=["item_id", "title", "year", "genres"],
        infer_schema=False,
        quote_char=None,
    ).sort(pl.col("item_id").cast(pl.Int64))
    return films.with_columns(
        pl.col("title").map_elements(article_first, return_dtype=pl.String),
        pl.col("year").cast(pl.Int32, strict=False),
        pl.col("genres").str.split(" "),
    ).with_columns(
        text=pl.format(
            "{} ({}), {}",
            "title",
            pl.col("year").cast(pl.String).fill_null("year unknown"),
            pl.col("genres").list.join(", "),
        )
    )


def article_first(title: str) -> str:
    """`Godfather, The` as people say it: `The Godfather`."""
    found = re.fullmatch(r"(.*?), (The|An?|L[ae]s?|Il|El|D[aei][rse])( \(.*)?", title)
    return f"{found[2]} {found[1]}{found[3] or ''}" if found else title


def user_vector(item_vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    """The vector of a user who watched these films `[n, d]`: their sum, of length sqrt(d)."""
    total = item_vectors.sum(axis=0, dtype=np.float64)
    total *= np.sqrt(len(total)) / np.linalg.norm(total)
    return total.astype(np.float32, copy=False)


def say(text: str) -> None:
    """One progress line, on stderr."""
    sys.stderr.write(text + "\n")


def read_build(parser: argparse.ArgumentParser) -> Build:
    """Parse a command line that has no option but `--build`."""
    return Build(parser.parse_args().build)


def run_step(main: Callable[[], None]) -> None:
    """Run a step; an error that we foresaw ends it with one line instead of a traceback."""
    try:
        main()
    except StepError as err:
        sys.exit(f"error: {err}")
    except FileNotFoundError as err:
        sys.exit(f"error: {err.filename or err}: no such file. Run build.py.")

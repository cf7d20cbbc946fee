"""Show what two nightshelf runs published: three users' lists, quality, and how to read the table.

Reads build/ and the published table: surface `home` (generate.yaml) and `email` (score.yaml).
`--json` prints the quality figures as one JSON line instead.

The figures come from `nightshelf evaluate`; the SVD's, which is no run, from the same functions.
recall_capped@10 = films of the first ten that the user watched afterwards / min(10, films watched
afterwards), averaged over users. NDCG@10 gives early places more weight; 1 is the best in both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from common import DS, HERE, Build, StepError, arguments, run_step
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.evaluation.metrics import UserTruth, metric_names, user_metrics
from schemas.requests import Ragged

USERS = ("42", "405", "846")
K = 10
METRICS = (f"recall_capped@{K}", f"ndcg@{K}")
SURFACES = {"home": "generate", "email": "score"}
WIDTH = 100


@dataclass(frozen=True)
class Data:
    """What is compared; users and items are row numbers of the users table and the catalog."""

    users: pl.DataFrame
    catalog: pl.DataFrame
    published: dict[str, pl.DataFrame]  # by surface
    watched: NDArray[np.bool_]  # [users, items], before the split
    later: NDArray[np.bool_]  # [users, items], held out
    svd: NDArray[np.float32]  # [users, items]


def main() -> None:
    """Print the demo's last page."""
    parser = arguments(__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line")
    args = parser.parse_args()
    build = Build(args.build)
    data = read(build)
    figures = quality(build, data)
    # Piped output has no width of its own; a terminal may be narrower than the page.
    console = Console(width=None if os.isatty(1) else WIDTH, highlight=False)
    if args.json:
        line = json.dumps({"ds": DS, "users": data.users.height, "k": K, "quality": figures})
        console.out(line)
        return
    for user_id in USERS:
        show_user(console, data, user_id)
    show_quality(console, figures, data)
    show_snippets(console, args.build)


def read(build: Build) -> Data:
    """Read the build folder and both surfaces of the published table."""
    users = pl.read_parquet(build.table("users"))
    catalog = pl.read_parquet(build.table("catalog"))
    with np.load(build.embeddings) as file:
        svd = file["users"] @ file["items"].T
    return Data(
        users=users,
        catalog=catalog,
        published={surface: read_surface(build, surface) for surface in SURFACES},
        watched=pairs(pl.read_parquet(build.table("exclusions")), users, catalog),
        later=pairs(pl.read_parquet(build.table("truth")), users, catalog),
        svd=svd,
    )


def read_surface(build: Build, surface: str) -> pl.DataFrame:
    """One partition of the table, in rank order."""
    folder = build.root / "recommendations" / f"ds={DS}" / f"surface={surface}"
    files = sorted(file for file in folder.glob("*.parquet") if file.name[0] not in "._")
    if not files:
        config = HERE / ("generate.yaml" if surface == "home" else "score.yaml")
        raise StepError(f"{folder} has no Parquet file. Run: nightshelf run {shown(config)}")
    # The folder already says ds and surface; they need not be columns of the files.
    return pl.read_parquet(files, hive_partitioning=False).sort("user_id", "rank")


def pairs(table: pl.DataFrame, users: pl.DataFrame, catalog: pl.DataFrame) -> NDArray[np.bool_]:
    """A table of user_id, item_id as a matrix `[users, items]`."""
    placed = table.join(users.select("user_id").with_row_index("u"), on="user_id").join(
        catalog.select("item_id").with_row_index("i"), on="item_id"
    )
    matrix = np.zeros((users.height, catalog.height), dtype=bool)
    matrix[placed["u"].to_numpy(), placed["i"].to_numpy()] = True
    return matrix


def quality(build: Build, data: Data) -> dict[str, dict[str, float]]:
    """The metrics of every method: both runs, the SVD, and the baselines of the first run."""
    found = {surface: evaluate(build, data.published[surface]) for surface in SURFACES}
    home, email = found["home"], found["email"]
    figures = {
        "generate": home["run"],
        "score": email["run"],
        "SVD": svd_quality(data),
        "popularity": home["popularity"],
        "random": home["random"],
    }
    return {method: {m: round(values[m], 4) for m in METRICS} for method, values in figures.items()}


def evaluate(build: Build, rows: pl.DataFrame) -> dict[str, dict[str, float]]:
    """What `nightshelf evaluate` says of the run that published these rows, by method."""
    run_dir = build.root / "runs" / rows["run_id"][0]
    command = [sys.executable, "-m", "jobs", "evaluate", str(run_dir), "--k", str(K)]
    command += ["--truth", str(build.table("truth")), "--bootstrap", "0", "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StepError(done.stderr.strip())
    methods = json.loads(done.stdout)["methods"]
    return {
        method: {name: cell["value"] for name, cell in metrics.items()}
        for method, metrics in methods.items()
    }


def svd_quality(data: Data) -> dict[str, float]:
    """The same metrics of the best unseen films by the user vector times the item vectors."""
    unseen = np.where(data.watched, -np.inf, data.svd)
    top = np.argsort(-unseen, axis=1, kind="stable")[:, :K]
    users, films = np.nonzero(data.later)
    lengths = np.bincount(users, minlength=data.users.height)
    truth = UserTruth(Ragged.from_lengths(lengths, films), np.ones(len(films)))
    values = user_metrics(top, truth, (K,), None, data.catalog.height)
    return dict(zip(metric_names((K,)), values.mean(axis=0).tolist(), strict=True))


def show_user(console: Console, data: Data, user_id: str) -> None:
    """One user's last films and the first five recommendations on each surface."""
    titles = dict(data.catalog.select("item_id", "title").iter_rows())
    index = data.users["user_id"].to_list().index(user_id)
    user = data.users.row(index, named=True)
    later = set(data.catalog["item_id"].filter(pl.Series(data.later[index])))
    last = ", ".join(titles[item_id] for item_id in user["history"][-5:])

    console.rule(f"[bold]user {user_id}[/]: {len(user['history'])} films watched", align="left")
    console.print(f"[dim]last five:[/] {escape(last)}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("", justify="right", width=1)
    lists = []
    for surface, task in SURFACES.items():
        table.add_column(f"{surface} ({task})", ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column("score", justify="right", width=6)
        best = data.published[surface].filter(pl.col("user_id") == user_id).head(5)
        lists.append(list(best.select("item_id", "score").iter_rows()))
    for rank in range(5):
        cells = [str(rank + 1)]
        for rows in lists:
            item_id, score = rows[rank] if rank < len(rows) else (None, None)
            star = " [green]★[/]" if item_id in later else ""
            cells += [escape(titles[item_id]) + star, f"{score:.2f}"] if item_id else ["", ""]
        table.add_row(*cells)
    console.print(table)


def show_quality(console: Console, figures: dict[str, dict[str, float]], data: Data) -> None:
    """The table of figures, and the share of lists proven exact."""
    console.print("[green]★[/] watched in the held-out period, which the model has not seen")
    console.print("score: sum of the log-probabilities of the film's three codes, in nats\n")
    notes = {
        "generate": "exact search of the whole catalog (surface home)",
        "score": "100 candidates ranked by the same model (surface email)",
        "SVD": "the user vector times the item vectors",
        "popularity": "the most watched films",
        "random": "any film",
    }
    title = f"{data.users.height:,} users, films watched before are left out of every list"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method")
    for name in figures["generate"]:
        table.add_column(name, justify="right")
    table.add_column("what it is", style="dim")
    for method, values in figures.items():
        table.add_row(method, *(f"{value:.3f}" for value in values.values()), notes[method])
    console.print(table)
    if "exact" in data.published["home"].columns:
        exact = data.published["home"].group_by("user_id").agg(pl.col("exact").all())["exact"]
        console.print(
            f"{exact.mean():.1%} of the search's lists are proven to be "
            "the model's best over the whole catalog."
        )
    truth = shown(HERE / "build" / "truth.parquet")
    console.print("[dim]all metrics, with intervals, by segment of the users:[/]")
    console.print(
        f"nightshelf evaluate {shown(HERE / 'generate.yaml')} --truth {truth} --by segment\n",
        soft_wrap=True,
    )


def show_snippets(console: Console, build: Path) -> None:
    """Where the table is, and lines to paste into Python."""
    table, catalog = shown(build / "recommendations"), shown(build / "catalog.parquet")
    files = f"{table}/*/*/*.parquet"
    console.rule("[bold]the table[/]", align="left")
    console.print(f"{table}/ds={DS}/surface=home/\n", soft_wrap=True)
    console.print("[dim]# polars[/]")
    polars = f"""\
import polars as pl
files = "{files}"
rows = pl.read_parquet(files, hive_partitioning=True)  # ds and surface are in the path
titles = pl.read_parquet("{catalog}").select("item_id", "title")
mine = rows.filter(user_id="{USERS[0]}").join(titles, on="item_id").sort("surface", "rank")
print(mine.select("surface", "rank", "title", "score"))
"""
    console.print(polars, markup=False, soft_wrap=True)
    console.print("[dim]# DuckDB[/]")
    duckdb = f"""\
import duckdb
print(duckdb.sql(\"\"\"
    select surface, rank, title, score
    from '{files}'
    join '{catalog}' using (item_id)
    where user_id = '{USERS[0]}' order by surface, rank
\"\"\"))"""
    console.print(duckdb, markup=False, soft_wrap=True)


def shown(path: Path) -> str:
    """A path as one would type it here."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    run_step(main)

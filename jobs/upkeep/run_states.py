"""Look at runs: what is done, and what one user got. Reads files only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from jobs.running.run_folder import load_plan, manifest_path
from pipelines.catalog.build import is_saved
from pipelines.catalog.items import catalog_dir, open_items, titles
from pipelines.inputs.prepare import shard_of
from pipelines.inputs.prepared import shards_of
from pipelines.publish import open_table
from pipelines.shards.profile import published_marker, table_key
from pipelines.shards.run_shard import load_receipt
from pipelines.sources.frames import read_frame
from pipelines.storage import files
from pipelines.storage.records import read_record
from schemas.errors import ConfigError, InputError, StorageError, quoted
from schemas.markers import ManifestHead
from schemas.runs import Counts, RunPlan, ShardReceipt, working_seconds
from schemas.settings import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """How far a run is."""

    run_id: str
    # planned, scoring, scored, published, replaced, withdrawn, failed, refused, unreadable
    status: str
    run_dir: str
    table: str = ""  # which it publishes to
    ds: str = ""
    surface: str = ""
    shards_done: int = 0
    shards: int = 0
    counts: Counts = Counts()
    seconds: float | None = None
    serves: tuple[str, ...] = ()  # other dates whose readers see its rows


class Serving:
    """Which run readers see, by date, as the tables say; each surface of a table is asked once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], dict[str, str]] = {}

    def dates(self, plan: RunPlan) -> dict[str, str]:
        """The run that is published for each date of the plan's table and surface."""
        key = (table_key(plan.config), plan.surface)
        if key not in self._found:
            self._found[key] = dict(open_table(plan.config, ds=plan.ds).dates())
        return self._found[key]


def run_status(run_dir: str, serving: Serving | None = None) -> RunStatus:
    """The status of one run folder."""
    plan = load_plan(run_dir)
    was_published = files.exists(published_marker(run_dir))
    try:
        dates = (serving or Serving()).dates(plan)
    except (StorageError, ConfigError):
        if was_published:
            raise
        dates = {}  # a table that is not to be had says nothing of what never reached it
    found = (load_receipt(plan, shard, prove=False) for shard in shards_of(plan))
    receipts = [receipt for receipt in found if receipt is not None]
    state, seconds = "planned", working_seconds(receipts) if receipts else None
    if receipts:
        state = "scored" if len(receipts) == plan.num_shards else "scoring"
    if files.exists(manifest_path(run_dir)):
        state = read_record(ManifestHead, manifest_path(run_dir)).status
    if dates.get(plan.ds) == plan.run_id:
        state = "published"
    elif was_published:  # whatever was tried with it since
        withdrawn = open_table(plan.config, ds=plan.ds).is_withdrawn(plan.run_id)
        state = "withdrawn" if withdrawn else "replaced"
    return RunStatus(
        run_id=plan.run_id,
        status=state,
        table=table_key(plan.config),
        ds=plan.ds,
        surface=plan.surface,
        shards_done=len(receipts),
        shards=plan.num_shards,
        counts=Counts.total(receipt.counts for receipt in receipts),
        seconds=seconds,
        run_dir=run_dir,
        serves=tuple(sorted(d for d, run in dates.items() if run == plan.run_id and d != plan.ds)),
    )


def all_runs(work_dir: str, ds: str = "") -> list[RunStatus]:
    """Status of every run below a work folder, or of one date's, newest date last."""
    root = files.local_path(work_dir) or work_dir
    fs, inside = files.filesystem(root)
    fs.invalidate_cache()
    if not fs.isdir(inside):
        return []
    named = (p for p in fs.ls(inside, detail=False) if p.rpartition("/")[2].startswith(ds))
    folders = sorted(p for p in named if fs.exists(f"{p}/plan.json"))  # a run's id begins with ds
    if "://" in root:
        folders = [str(fs.unstrip_protocol(folder)) for folder in folders]
    serving = Serving()
    return [_status_or_unreadable(folder, serving) for folder in folders]


def _status_or_unreadable(run_dir: str, serving: Serving) -> RunStatus:
    """One folder that cannot be read hides no other."""
    try:
        return run_status(run_dir, serving)
    except (StorageError, ConfigError):
        run_id = run_dir.rpartition("/")[2]
        return RunStatus(run_id=run_id, status="unreadable", run_dir=run_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserView:
    """One user's recommendations, with the titles of the catalog; or why there are none."""

    user: str
    run_id: str
    rows: list[dict[str, Any]] = field(default_factory=list)  # rank, item_id, title, score, source
    exact: bool | None = None
    embedding: list[float] | None = None
    why_not: str | None = None


def show_user(config: RunConfig, user: str) -> UserView:
    """What is published for one user.

    Raises:
        InputError: the run does not know the user.
        StorageError: nothing is published for this date and surface.
    """
    plan = published_plan(config)
    user_id: str | int = user
    if plan.user_id_type == "int64":
        try:
            user_id = int(user)
        except ValueError:
            raise ConfigError("--user must be a number for this table", got=quoted(user)) from None
    index = _shard_of(plan, user)
    rows = pl.from_arrow(open_table(config).read(user_id=user_id, shard=index))
    assert isinstance(rows, pl.DataFrame), "a table is a frame"
    if rows.is_empty():
        why = _why_not(plan, index, user)
        return UserView(user=user, run_id=plan.run_id, why_not=why)
    if "embedding" in rows.columns:
        return UserView(user=user, run_id=plan.run_id, embedding=rows["embedding"][0].to_list())
    exact = bool(rows["exact"][0])
    if "items" in rows.columns:  # the wide layout
        rows = rows.select("items").explode("items").unnest("items").with_row_index("rank", 1)
    catalog = open_items(plan) if is_saved(catalog_dir(plan)) else None
    named = pl.Series("title", [None] * len(rows), dtype=pl.String)
    if catalog is not None:
        named = pl.Series("title", titles(plan.config, catalog, rows["item_id"].to_arrow()))
    rows = rows.select("rank", "item_id", "score", "source").with_columns(named).sort("rank")
    return UserView(user=user, rows=rows.to_dicts(), exact=exact, run_id=plan.run_id)


def _shard_of(plan: RunPlan, user: str) -> int | None:
    """The shard of a user; None: any, in a table whose own files are the shards."""
    if plan.config.inputs.self_contained:
        return None
    return int(shard_of([user], plan.num_shards)[0])


def published_plan(config: RunConfig) -> RunPlan:
    """The plan of the run that readers see."""
    published = open_table(config).current()
    if published is None:
        raise StorageError(
            "nothing is published",
            got=f"ds {config.ds}, surface {config.surface!r}",
            where=config.output.path,
            do="Run it first: nightshelf run CONFIG.",
        )
    return load_plan(files.join(config.run.work_dir, published.run_id))


def _why_not(plan: RunPlan, index: int | None, user: str) -> str:
    """What the run says of a user that has no row.

    Raises:
        InputError: it does not know the user.
    """
    shards = shards_of(plan)
    for shard in shards if index is None else [shards[index]]:
        receipt = load_receipt(plan, shard)
        if receipt is None:
            return "the run's folder is gone; nothing more is known"
        if (why := _why_not_in(plan, receipt, user)) is not None:
            return why
    raise InputError(
        "the user is not in the users table",
        got=f"user {quoted(user)}",
        where=f"run {plan.run_id}",
    )


def _why_not_in(plan: RunPlan, receipt: ShardReceipt, user: str) -> str | None:
    """What a shard says of a user that has no row; None: it does not know the user."""
    path = files.join(plan.run_dir, receipt.files["quarantine"].path)
    bad = read_frame(path).filter((pl.col("table") == "users") & (pl.col("key") == user))
    if not bad.is_empty():
        row = bad.row(0, named=True)
        return f"quarantined by rule {row['rule']}: {row['message']} (file {row['file']})"
    outcomes = read_frame(files.join(plan.run_dir, receipt.files["outcomes"].path))
    mine = outcomes.filter(pl.col("user_id").cast(pl.String) == user)
    return None if mine.is_empty() else f"nothing eligible: {mine['reason'][0]}"

"""What one user got, or why nothing. Reads files only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from jobs.upkeep.run_states import published_plan
from pipelines.catalog.build import is_saved
from pipelines.catalog.items import catalog_dir, open_items, titles
from pipelines.inputs.prepare import shard_of
from pipelines.inputs.prepared import shards_of
from pipelines.publish import open_table
from pipelines.shards.run_shard import load_receipt
from pipelines.sources.frames import read_frame
from pipelines.storage import files
from schemas.errors import ConfigError, InputError, quoted
from schemas.runs import RunPlan, ShardReceipt
from schemas.settings import RunConfig


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

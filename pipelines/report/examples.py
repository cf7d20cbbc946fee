"""Users that a report shows, with what the prompt was made of and what they got.

The users whose hashed id is smallest, so that a page shows the same ones every night; a few without
any recommendation; and those that were asked for by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from pipelines.catalog.items import open_items, titles
from pipelines.inputs.prepare import shard_of
from pipelines.inputs.prepared import shards_of
from pipelines.inputs.shard_columns import id_dtype
from pipelines.report.staged import Staged
from pipelines.shards.profile import load_sample, user_hashes
from pipelines.sources import input_files
from pipelines.storage import files
from schemas.errors import ConfigError, quoted
from schemas.runs import RunManifest, RunPlan, Shard

LIST_SHOWN = 20
HISTORY_SHOWN = 20
_EMPTY_SHOWN = 5
_TEXT = 100  # characters of a title or a field
_ID = 200
_NUMBERS = 8  # of an embedding
_HISTORY, _HISTORY_ITEMS = "shard.history", "shard.history_items"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Users and the titles of their items, as the page embeds them.

    A user: `id, status, reason, exact, returned, fields, history, history_items, items`; `history`
    holds places in `items`, the latest first; `items` of a user [place, score, source, is new].
    """

    items: tuple[tuple[str, str | None], ...] = ()  # id, title
    users: tuple[dict[str, Any], ...] = ()
    every_night: bool = False  # chosen by hash among all users, so that other runs show the same


def choose_examples(staged: Staged, wanted: Sequence[str] = ()) -> Examples:
    """The users of `report.examples`, and `wanted` before them.

    Raises:
        ConfigError: an id of `wanted` cannot be one of this table.
    """
    manifest, outcomes = staged.manifest, staged.scan("outcomes")
    num = manifest.plan.config.report.examples
    if outcomes is None or (num == 0 and not wanted):
        return Examples()
    sample = load_sample(manifest.plan.run_dir)
    asked = _ids(manifest, wanted)
    chosen = pl.concat([asked, _sampled(sample, outcomes, num)]).unique(maintain_order=True)
    got = _of(outcomes, chosen)
    users = chosen.to_frame("user_id").join(got, on="user_id", how="left", maintain_order="left")
    recommended = _lists(staged, chosen)
    inputs = _inputs(manifest, chosen)
    places = _Places(manifest)
    cards = [
        _card(row, recommended.get(row["user_id"], []), inputs.get(row["user_id"], {}), places)
        for row in users.to_dicts()
    ]
    cards = [card | _set_aside(staged, card["id"]) if card["status"] is None else card
             for card in cards]  # fmt: skip
    every_night = sample is not None
    return Examples(items=places.named(), users=tuple(cards), every_night=every_night)


def _ids(manifest: RunManifest, wanted: Sequence[str]) -> pl.Series:
    """Ids from the command line, in the type of the table."""
    if manifest.plan.user_id_type == "string":
        return pl.Series("user_id", list(wanted), dtype=pl.String)
    try:
        return pl.Series("user_id", [int(user) for user in wanted], dtype=pl.Int64)
    except (ValueError, OverflowError):
        raise ConfigError(
            "--user must be a number for this table", got=quoted(" ".join(wanted))
        ) from None


def _sampled(sample: pl.DataFrame | None, outcomes: pl.LazyFrame, num: int) -> pl.Series:
    """The users with the smallest hashes: of the audit's sample, which holds just those, or of the
    first shards where there is none.
    """
    if sample is not None:
        users = sample.filter(pl.col("rank") == 1)["user_id"]
    else:
        users = outcomes.select("user_id").head(50 * num).collect(engine="streaming")["user_id"]
    first = np.argsort(user_hashes(users), kind="stable")[:num]
    empty = outcomes.filter(pl.col("status") == "nothing_eligible").select("user_id")
    without = empty.head(min(num, _EMPTY_SHOWN)).collect(engine="streaming")["user_id"]
    return pl.concat([users.gather(first), without])


def _of(frame: pl.LazyFrame, users: pl.Series) -> pl.DataFrame:
    """Rows of these users."""
    mine = frame.filter(pl.col("user_id").is_in(users.implode()))
    return mine.collect(engine="streaming")


def _lists(staged: Staged, users: pl.Series) -> dict[Any, list[dict[str, Any]]]:
    """The first rows of each user's list; of an embedding its first numbers."""
    embed = not staged.manifest.plan.config.task.gives_lists
    rows = staged.scan("embeddings" if embed else "recommendations")
    if rows is None:
        return {}
    if embed:
        frame = _of(rows.select("user_id", "embedding"), users)
        head = pl.col("embedding").arr.to_list().list.head(_NUMBERS).alias("numbers")
        frame = frame.with_columns(head, width=pl.col("embedding").arr.len()).drop("embedding")
    else:
        frame = _of(rows.filter(pl.col("rank") <= LIST_SHOWN).drop("run_id"), users)
        frame = _mark_new(staged.manifest, frame).sort("user_id", "rank")
    return {
        key[0]: part.to_dicts() for key, part in frame.partition_by("user_id", as_dict=True).items()
    }


def _mark_new(manifest: RunManifest, rows: pl.DataFrame) -> pl.DataFrame:
    """`new`: the item was not in the user's list of the run before; null: that is not known."""
    gates = manifest.audit.gates if manifest.audit else ()
    other = next((gate.against for gate in gates if gate.against is not None), None)
    work_dir = manifest.plan.config.run.work_dir
    before = load_sample(files.join(work_dir, other)) if other is not None else None
    types = ("user_id", "item_id")
    if before is None or any(before.schema[n] != rows.schema[n] for n in types):
        return rows.with_columns(new=pl.lit(None, dtype=pl.Boolean))
    known = before.select("user_id").unique().with_columns(known=pl.lit(value=True))
    pairs = before.select("user_id", "item_id").with_columns(had=pl.lit(value=True))
    rows = rows.join(known, on="user_id", how="left").join(pairs, on=list(types), how="left")
    new = pl.when(pl.col("known")).then(pl.col("had").is_null())
    return rows.with_columns(new=new).drop("known", "had")


def _inputs(manifest: RunManifest, users: pl.Series) -> dict[Any, dict[str, Any]]:
    """What the prompts of these users were made of, as far as the shards are still there."""
    plan = manifest.plan
    done = {receipt.shard for receipt in manifest.shards}
    if not plan.config.inputs.self_contained:
        texts = users.cast(pl.String).to_list()
        done &= set(shard_of(texts, plan.num_shards).tolist())
    found: dict[Any, dict[str, Any]] = {}
    for shard in shards_of(plan):
        if shard.index in done and _as_planned(plan, shard):
            rows = _prompts_of(plan, shard.path, users).to_dicts()
            found |= {row["user_id"]: row for row in rows}
    return found


def _as_planned(plan: RunPlan, shard: Shard) -> bool:
    """Whether the file is there, and still the one that the run read."""
    if not files.exists(shard.path):
        return False
    if not plan.config.inputs.self_contained:
        return True
    version = input_files.describe_file(shard.path, "users")[0].version
    return version == plan.inputs["users"].files[shard.index].version


def _prompts_of(plan: RunPlan, path: str, users: pl.Series) -> pl.DataFrame:
    """Columns of a shard that prompts show; of a user that stands twice the row that was used."""
    template = plan.config.prompt.parsed
    schema = input_files.describe_file(path, "users")[1]
    named = dict.fromkeys(name for name in (*template.columns, "segment") if name != "user_id")
    fields = [name for name in named if name in schema.names]
    history = ["history"] if template.uses("history") else []
    frame = pl.from_arrow(files.read_parquet(path, ["user_id", *fields, *history]))
    assert isinstance(frame, pl.DataFrame), "a table is a frame"
    frame = frame.with_columns(pl.col("user_id").cast(id_dtype(plan.user_id_type)))
    frame = frame.filter(pl.col("user_id").is_in(users.implode()))
    columns = [pl.col(name).cast(pl.String) for name in fields]
    if history:
        items = pl.col("history")
        if isinstance(frame.schema["history"], pl.Array):
            items = items.arr.to_list()
        items = items.cast(pl.List(id_dtype(plan.item_id_type)))
        columns += [items.list.len().alias(_HISTORY_ITEMS),
                    items.list.tail(HISTORY_SHOWN).list.reverse().alias(_HISTORY)]  # fmt: skip
    return frame.select("user_id", *columns).unique("user_id", keep="first", maintain_order=True)


def _set_aside(staged: Staged, user: str) -> dict[str, Any]:
    """Why a user that was asked for has no outcome."""
    rows = staged.scan("quarantine")
    missing = {"status": "not in the run", "reason": "no finished shard has this user"}
    if rows is None:
        return missing
    mine = rows.filter((pl.col("table") == "users") & (pl.col("key") == user)).head(1)
    found = mine.collect(engine="streaming").to_dicts()
    if not found:
        return missing
    return {"status": "quarantined", "reason": f"{found[0]['rule']}: {found[0]['message']}"}


class _Places:
    """Items by their place in the page's table of items, so that a title stands once."""

    def __init__(self, manifest: RunManifest) -> None:
        self._plan = manifest.plan
        self._place: dict[Any, int] = {}

    def __call__(self, item: Any) -> int:
        return self._place.setdefault(item, len(self._place))

    def named(self) -> tuple[tuple[str, str | None], ...]:
        """Id and title of every item that was asked for."""
        catalog = open_items(self._plan) if self._place else None
        if catalog is None:
            return tuple((shortened(str(item), _ID), None) for item in self._place)
        dtype = id_dtype(self._plan.item_id_type)
        ids = pl.Series("item_id", list(self._place), dtype=dtype).to_arrow()
        names = titles(self._plan.config, catalog, ids).to_pylist()
        pairs = zip(self._place, names, strict=True)
        return tuple(
            (shortened(str(item), _ID), None if name is None else shortened(name, _TEXT))
            for item, name in pairs
        )


def shortened(text: str, most: int) -> str:
    """The text, cut where it is longer than a page wants."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _card(
    got: dict[str, Any], rows: list[dict[str, Any]], inputs: dict[str, Any], place: _Places
) -> dict[str, Any]:
    """One user as the page shows it; `got` is its outcome, all null where it has none."""
    skip = ("user_id", _HISTORY, _HISTORY_ITEMS)
    fields = {
        name: shortened(value, _TEXT)
        for name, value in inputs.items()
        if name not in skip and value is not None
    }
    card = {
        "id": shortened(str(got["user_id"]), _ID),
        "status": got["status"],
        "reason": got["reason"],
        "exact": got["exact"],
        "returned": got["returned"],
        "fields": fields,
        "history": [place(item) for item in inputs.get(_HISTORY) or [] if item is not None],
        "history_items": inputs.get(_HISTORY_ITEMS) or 0,
        "truncated_tokens": got["truncated_tokens"],
    }
    if rows and "numbers" in rows[0]:
        card["embedding"] = [round(x, 4) for x in rows[0]["numbers"]]
        card["width"] = rows[0]["width"]
        return card
    card["items"] = [
        [place(row["item_id"]), round(row["score"], 4), row["source"], row["new"],
         *([_labels(row["labels"])] if "labels" in row else [])]
        for row in rows
    ]  # fmt: skip
    return card


def _labels(labels: list[dict[str, Any]]) -> str:
    shown = ", ".join(f"{one['label']} {one['score']:.3f}" for one in labels)
    return shortened(shown, _TEXT)

"""Nights that go wrong quietly: nothing breaks, every row is well formed, the lists are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.factories import write_config, write_inputs

ROWS = "out/ds=2026-11-28/surface=home/*.parquet"


def rows(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / ROWS, hive_partitioning=False)


def write_history(folder: Path, tables: dict[str, pa.Table], history: list) -> None:
    users = tables["users"]
    column = pa.array(history, users.schema.field("history").type)
    at = users.schema.get_field_index("history")
    pq.write_table(users.set_column(at, "history", column), folder / "users.parquet")


def gate(folder: Path, name: str) -> dict:
    (path,) = folder.glob("runs/2*/audit.json")
    return next(g for g in json.loads(path.read_text())["gates"] if g["gate"] == name)


# --- histories the catalog does not know ----------------------------------------------------------


def known_and_unknown(tables: dict[str, pa.Table], known: int, unknown: int) -> list[list[str]]:
    items = tables["catalog"]["item_id"].to_pylist()
    return [items[u : u + known] + [f"old-{u}-{n}" for n in range(unknown)] for u in range(40)]


@pytest.mark.parametrize(
    ("known", "unknown", "limit", "code"),
    [
        (0, 4, None, 6),  # a re-keyed catalog, or histories written as semantic IDs
        (2, 2, None, 6),  # half is refused too
        (3, 2, None, 0),
        (4, 0, None, 0),
        (0, 4, 1.0, 0),  # whoever asks for it
        (3, 1, 0.2, 6),
        (3, 1, 0.0, 6),
        (4, 0, 0.0, 0),  # nothing is unknown, and nothing may be
        (0, 0, None, 0),  # new users only: nothing to compare
    ],
)
def test_a_history_that_the_catalog_does_not_know_is_refused(
    nightshelf, tmp_path, known, unknown, limit, code
):
    tables = write_inputs(tmp_path)
    write_history(tmp_path, tables, known_and_unknown(tables, known, unknown))
    limits = {} if limit is None else {"audit__max_unknown_history": limit}
    done = nightshelf("run", write_config(tmp_path, **limits), check=code)
    assert ("unknown_history" in done.err) == (code == 6)
    share = unknown / (known + unknown) if known + unknown else None
    assert gate(tmp_path, "unknown_history")["value"] == share


def test_the_summary_says_what_the_catalog_does_not_know(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    write_history(tmp_path, tables, known_and_unknown(tables, 3, 1))
    config = write_config(tmp_path)
    assert "40 items not in the catalog (25.0 %)" in nightshelf("run", config).out
    found = nightshelf("run", config, "--output", "json").json
    assert found["unknown_history_items"] == 40
    assert found["unknown_history_share"] == 0.25
    assert found["legal_mass"] is not None


# --- what the user has already --------------------------------------------------------------------


@pytest.mark.parametrize("task", ["score", "generate", "both"])
@pytest.mark.parametrize("template", ["Hi {history}", "Hi {user_vector}"])
@pytest.mark.parametrize("own", [True, False], ids=["self-contained", "joined"])
def test_nobody_is_recommended_their_own_history(nightshelf, tmp_path, task, template, own):
    """Also where the prompt has no history, or holds a part of it only."""
    tables = write_inputs(tmp_path)
    items = tables["catalog"]["item_id"].to_pylist()
    rng = np.random.default_rng(5)
    history = [[items[i] for i in rng.choice(60, 20, replace=False)] for _ in range(40)]
    write_history(tmp_path, tables, history)
    if own:
        users = pq.read_table(tmp_path / "users.parquet")
        users = users.append_column("item_ids", tables["candidates"]["item_ids"])
        pq.write_table(users, tmp_path / "users.parquet")
    tasks = {"score": {"k": 5, "score": {}}, "generate": {"k": 5, "generate": {"width": 64}}}
    tasks["both"] = {**tasks["score"], **tasks["generate"]}
    inputs = {"users": "users.parquet", "catalog": "catalog.parquet"}
    inputs |= {"self_contained": True} if own else {"candidates": "candidates.parquet"}
    if task == "generate":
        inputs.pop("candidates", None)
    changes = {"prompt": {"template": template, "history_max_items": 2}, "inputs": inputs}
    config = write_config(tmp_path, task=tasks[task], run__shard_users=40, **changes)

    def again() -> int:
        seen = {(f"u{u:03d}", item) for u, list_ in enumerate(history) for item in list_}
        return sum(pair in seen for pair in rows(tmp_path).select("user_id", "item_id").rows())

    nightshelf("run", config)
    before, expected = again(), len(rows(tmp_path))
    assert before > 0, "the input must show the difference"
    done = nightshelf("run", config, "--set", "task.exclude_history=true", "--output", "json")
    assert again() == 0
    if task == "generate":  # the catalog has enough for everybody
        assert len(rows(tmp_path)) == expected
    if template == "Hi {history}":
        assert done.json["history_rows_share"] == 0


def test_rows_of_the_own_history_can_be_refused(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, audit={"max_history_rows": 0.0})
    assert "history_rows" in nightshelf("run", config, check=6).err
    nightshelf("run", config, "--set", "task.exclude_history=true")


def test_a_limit_on_history_needs_a_history(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(
        tmp_path, prompt={"template": "Hi {user_vector}"}, audit={"max_history_rows": 0.1}
    )
    assert "audit.max_history_rows" in nightshelf("validate", config, check=2).out


# --- one list for everybody -----------------------------------------------------------------------


@pytest.mark.parametrize(("own", "share"), [(0, 1 / 40), (10, 11 / 40)])
def test_the_share_of_distinct_lists(nightshelf, tmp_path, own, share):
    """The labels of the fake backend depend on the user; k = 1 of one candidate does not."""
    tables = write_inputs(tmp_path)
    items = tables["catalog"]["item_id"].to_pylist()
    sets = [[items[u + 1]] if u < own else [items[0]] for u in range(40)]
    pq.write_table(
        pa.table({"user_id": tables["users"]["user_id"], "item_ids": sets}),
        tmp_path / "candidates.parquet",
    )
    config = write_config(
        tmp_path, task={"k": 1, "score": {}}, inputs__exclusions=None, audit__min_distinct_lists=0.2
    )
    nightshelf("run", config, check=0 if share >= 0.2 else 6)
    assert gate(tmp_path, "distinct_lists")["value"] == pytest.approx(share)


def test_the_order_of_a_list_counts(nightshelf, tmp_path):
    """Two users with the same items in another order have two lists."""
    tables = write_inputs(tmp_path)
    two = tables["catalog"]["item_id"].to_pylist()[:2]
    pq.write_table(
        pa.table({"user_id": tables["users"]["user_id"], "item_ids": [two] * 40}),
        tmp_path / "candidates.parquet",
    )
    nightshelf("run", write_config(tmp_path, task={"k": 2, "score": {}}, inputs__exclusions=None))
    lists = rows(tmp_path).sort("user_id", "rank").group_by("user_id").agg("item_id")
    distinct = len({tuple(items) for items in lists["item_id"].to_list()})
    assert distinct == 2
    assert gate(tmp_path, "distinct_lists")["value"] == 2 / 40


# --- a users table that was cut short -------------------------------------------------------------


def test_a_users_table_cut_short_is_refused_by_what_init_proposes(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = tmp_path / "night.yaml"
    nightshelf("init", "--users", tmp_path / "users.parquet", "--catalog",
               tmp_path / "catalog.parquet", "-o", config)  # fmt: skip
    small = ("--set", "run.workers=0", "--set", "task.k=5")
    nightshelf("run", config, "--ds", "2026-11-28", *small)
    pq.write_table(tables["users"].slice(0, 4), tmp_path / "users.parquet")
    assert "row_change" in nightshelf("run", config, "--ds", "2026-11-29", *small, check=6).err


def test_a_large_change_of_rows_is_said_loudly(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path)
    assert "run before" not in nightshelf("run", config, "--ds", "2026-11-28").out
    pq.write_table(tables["users"].slice(0, 4), tmp_path / "users.parquet")
    assert "than the run before" in nightshelf("run", config, "--ds", "2026-11-29").out


# --- what init and validate say of dates and ready-made prompts -----------------------------------


def write_days(folder: Path, name: str, table: pa.Table, *days: str) -> None:
    for day in days:
        (folder / name / f"ds={day}").mkdir(parents=True)
        pq.write_table(table, folder / name / f"ds={day}" / "part-0.parquet")


def test_init_writes_the_date_into_every_path(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    write_days(tmp_path, "candidates", tables["candidates"], "2026-11-27")
    nightshelf("init", "--users", tmp_path / "users.parquet", "--catalog",
               tmp_path / "catalog.parquet", "--candidates",
               tmp_path / "candidates/ds=2026-11-27/", "-o", tmp_path / "a.yaml")  # fmt: skip
    found = yaml.safe_load((tmp_path / "a.yaml").read_text())
    assert found["inputs"]["candidates"] == "candidates/ds={ds}"
    assert str(found["ds"]) == "2026-11-27"
    nightshelf("run", tmp_path / "a.yaml", "--set", "run.workers=0")


def test_init_takes_the_latest_of_a_folder_of_days(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    write_days(tmp_path, "daily", tables["users"], "2026-11-26", "2026-11-28", "2026-11-27")
    nightshelf("init", "--users", tmp_path / "daily", "--catalog", tmp_path / "catalog.parquet",
               "-o", tmp_path / "a.yaml")  # fmt: skip
    found = yaml.safe_load((tmp_path / "a.yaml").read_text())
    assert found["inputs"]["users"] == "daily/ds={ds}"
    assert str(found["ds"]) == "2026-11-28"
    done = nightshelf("run", tmp_path / "a.yaml", "--set", "run.workers=0", "--output", "json")
    assert done.json["users_in"] == 40


def test_validate_points_out_a_folder_of_days(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    write_days(tmp_path, "daily", tables["users"], "2026-11-27", "2026-11-28")
    config = write_config(tmp_path, inputs__users="daily")
    out = nightshelf("validate", config, check=None).out
    assert "the folder has a part" in out
    once = write_config(tmp_path, inputs__users="daily/ds={ds}/")
    assert "days, 2026" not in nightshelf("validate", once).out


@pytest.mark.parametrize("text", ["<a_1><b_2><c_3> and more", "<|im_start|>user\nhello<|im_end|>"])
def test_validate_warns_of_prompts_made_already(nightshelf, tmp_path, text):
    tables = write_inputs(tmp_path)
    for column, warned in (("plain people's text", False), (text, True)):
        users = tables["users"].append_column("prompt", pa.array([column] * 40))
        pq.write_table(users, tmp_path / "users.parquet")
        config = write_config(tmp_path, prompt={"template": "{text:prompt}", "max_tokens": 512})
        out = nightshelf("validate", config).out
        assert ("made already" in " ".join(out.split())) == warned

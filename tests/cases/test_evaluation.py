"""CASES about measuring: what is a hit, who counts, and what the figures are of."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from tests.cases.helpers import published, write
from tests.factories import write_config, write_inputs

# Nine of ten items share one SID, as with a tokenizer that has collapsed.
ITEMS = [f"i{n}" for n in range(10)]
SIDS = [[1, 2, 3]] * 9 + [[0, 0, 0]]


def evaluated(nightshelf, folder: Path, *args) -> dict:
    truth = folder / "truth.parquet"
    done = nightshelf("evaluate", folder / "run.yaml", "--truth", truth, *args, "--output", "json")
    return done.json


def run_collapsed(nightshelf, folder: Path, truth: dict, **task) -> dict[str, float]:
    """The run's figures for ten users who get the collapsed SID's items."""
    users = [f"u{n}" for n in range(10)]
    write(folder, "users", {"user_id": users, "history": [["i9"]] * 10})
    write(folder, "catalog", {"item_id": ITEMS, "sid": SIDS, "popularity": range(10, 0, -1)})
    write(folder, "exclusions", {"user_id": users, "item_id": ["i9"] * 10})
    write(folder, "truth", truth)
    config = write_config(
        folder,
        prompt__template="Hi {history}",
        inputs__candidates=None,
        task={"k": 9, "generate": {"width": 8}, **task},
    )
    nightshelf("run", config)
    found = evaluated(nightshelf, folder, "--k", "1,3,9")
    return {name: cell["value"] for name, cell in found["methods"]["run"].items()}


def test_an_item_of_the_right_sid_is_no_hit(nightshelf, tmp_path):
    """B4, OneRec-Think #11: at the level of SIDs every user of a collapsed catalog is a hit."""
    truth = {"user_id": [f"u{n}" for n in range(9)], "item_id": ITEMS[:9]}
    found = run_collapsed(nightshelf, tmp_path, truth)
    rows = published(tmp_path)
    assert rows.filter(rank=1)["item_id"].to_list() == ["i0"] * 10
    # Each user's item is one of nine that share a SID, and stands at its own rank.
    assert found["hit_rate@1"] == pytest.approx(1 / 9)
    assert found["hit_rate@3"] == pytest.approx(3 / 9)
    assert found["hit_rate@9"] == found["recall@9"] == 1
    assert found["mrr@9"] == pytest.approx(sum(1 / r for r in range(1, 10)) / 9)


def test_items_that_a_collision_policy_drops_are_misses(nightshelf, tmp_path):
    """B3, B4: with one item per SID, the other eight are never recommended."""
    truth = {"user_id": [f"u{n}" for n in range(9)], "item_id": ITEMS[:9]}
    found = run_collapsed(nightshelf, tmp_path, truth, collisions="most_popular")
    assert found["recall@9"] == found["hit_rate@1"] == pytest.approx(1 / 9)
    assert found["coverage@9"] == pytest.approx(1 / 10)


def test_two_items_of_one_sid_in_the_truth_are_two_items(nightshelf, tmp_path):
    """B4: the truth is counted in items too."""
    found = run_collapsed(nightshelf, tmp_path, {"user_id": ["u0"], "item_ids": [["i0", "i4"]]})
    assert found["recall@1"] == found["recall@3"] == 0.5
    assert found["recall@9"] == 1


def test_figures_say_which_settings_they_are_of(nightshelf, tmp_path):
    """B18, RQ-VAE-Recommender #28, MiniOneRec #71, al_sid #3: numbers nobody can reproduce."""
    write_inputs(tmp_path)
    write(tmp_path, "truth", {"user_id": ["u001"], "item_id": ["i001"]})
    task = {"k": 5, "generate": {"width": 7}, "score_norm": "trie", "collisions": "first"}
    nightshelf("run", write_config(tmp_path, task=task))
    found = evaluated(nightshelf, tmp_path, "--seed", "9")
    assert found["task"]["generate"]["width"] == 7
    assert (found["task"]["score_norm"], found["task"]["collisions"]) == ("trie", "first")
    assert {"config", "inputs", "model"} <= set(found["hashes"])
    assert (found["seed"], found["bootstrap"], found["k"]) == (9, 1000, [1, 5])


def test_users_that_failed_count_as_zero_and_not_as_absent(nightshelf, tmp_path):
    """A24: a failed user that is left out makes a run look better the more users fail."""
    tables = write_inputs(tmp_path, num_users=4)
    write(tmp_path, "users", tables["users"].set_column(
        1, "embedding", pa.array([[1.0] * 4, None, [1.0] * 4, [1.0] * 4], pa.list_(pa.float32()))
    ))  # fmt: skip
    nightshelf("run", write_config(tmp_path, task={"k": 60, "generate": {"width": 60}}))
    lists = published(tmp_path).group_by("user_id").agg(pl.col("item_id").alias("item_ids"))
    perfect = pl.concat([lists, pl.DataFrame({"user_id": ["u001"], "item_ids": [["i001"]]})])
    write(tmp_path, "truth", perfect.to_arrow())
    found = evaluated(nightshelf, tmp_path, "--k", "60")
    assert found["users"]["with_list"] == 3
    assert found["users"]["coverage"] == 0.75
    for method in ("run", "popularity", "random"):
        assert found["methods"][method]["recall@60"]["value"] == 0.75, method


def test_ids_that_look_like_numbers_stay_texts(nightshelf, tmp_path):
    """C17, arrow #39660: "007" in the truth is not the item 7, and not the item "7"."""
    write(tmp_path, "users", {"user_id": ["01", "1"], "history": [["007"], ["007"]]})
    write(tmp_path, "catalog", {"item_id": ["007", "7"], "sid": [[0, 0, 0], [1, 1, 1]]})
    config = write_config(
        tmp_path,
        prompt__template="Hi {history}",
        inputs__candidates=None,
        inputs__exclusions=None,
        task={"k": 1, "generate": {"width": 8}},
    )
    nightshelf("run", config)
    top = dict(published(tmp_path).select("user_id", "item_id").iter_rows())
    other = {"007": "7", "7": "007"}
    write(tmp_path, "truth", {"user_id": ["01", "1"], "item_id": [top["01"], other[top["1"]]]})
    assert evaluated(nightshelf, tmp_path)["methods"]["run"]["recall@1"]["value"] == 0.5


def test_a_truth_written_in_many_files_of_differing_integer_types_is_one_table(
    nightshelf, tmp_path
):
    """C18, C19, C20, C31: large strings, other widths, hidden files, nulls among int64 ids."""
    write_inputs(tmp_path, int_ids=True)
    nightshelf("run", write_config(tmp_path, task={"k": 5, "generate": {"width": 60}}))
    big = 2**53 + 1  # a detour over floats would lose its last digit
    parts = [
        pa.table({"user_id": pa.array([7, 8], pa.int32()), "item_id": pa.array([100, 101])}),
        pa.table({"item_id": pa.array([102, None, big]), "user_id": pa.array([9, 10, 11])}),
    ]
    folder = tmp_path / "truth.parquet"
    (folder / "_temporary").mkdir(parents=True)
    for number, part in enumerate(parts):
        write(folder, f"part-{number}", part)
    write(folder / "_temporary", "part-9", parts[0])
    truth = evaluated(nightshelf, tmp_path)["truth"]
    assert (truth["rows"], truth["rows_null"], truth["pairs"]) == (5, 1, 4)
    assert truth["pairs_unknown"] == 1

"""CASES B: semantic IDs name items; several items of one semantic ID; settings on record."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal

from tests.cases.helpers import published, torch_config, with_column, write
from tests.factories import write_config, write_inputs

TASKS = pytest.mark.parametrize(
    "task", [{"score": {}}, {"generate": {"width": 50}}], ids=["score", "generate"]
)
# "z", "m" and "b" share one SID; in the catalog file z comes first; m is the most popular.
ITEMS = ["z", "q", "m", "b", "p"]
SIDS = [[1, 2, 3], [0, 0, 0], [1, 2, 3], [1, 2, 3], [4, 3, 5]]
POPULARITY = [5, 1, 9, 7, 1]


def run_collisions(nightshelf, folder: Path, task, excluded=(), **changes) -> list[str]:
    """The items of the one user, best first."""
    write(folder, "users", {"user_id": ["u"], "history": [["q"]]})
    write(folder, "catalog", {"item_id": ITEMS, "sid": SIDS, "popularity": POPULARITY})
    write(folder, "candidates", {"item_id": ITEMS})
    pairs = {"user_id": ["u"] * len(excluded), "item_id": list(excluded)}
    write(folder, "exclusions", pa.table(pairs, pa.schema(dict.fromkeys(pairs, pa.string()))))
    config = write_config(folder, prompt__template="Hi {history}", task={"k": 5, **task, **changes})
    nightshelf("run", config)
    return published(folder)["item_id"].to_list()


@TASKS
def test_all_items_of_one_sid_are_returned_in_the_order_of_their_ids(nightshelf, tmp_path, task):
    """A23, B3, B5: NVIDIA's catalog refuses two items of one SID; others keep only the first."""
    items = run_collisions(nightshelf, tmp_path, task)
    rows = published(tmp_path)
    assert sorted(items) == sorted(ITEMS)
    at = items.index("b")
    assert items[at : at + 3] == ["b", "m", "z"]
    scores = rows["score"].to_list()
    assert scores[at] == scores[at + 1] == scores[at + 2]
    assert len(set(scores)) == 3
    assert rows["rank"].to_list() == [1, 2, 3, 4, 5]
    # k counts items, not SIDs: the group is cut inside.
    for k in range(1, 5):
        assert run_collisions(nightshelf, tmp_path, task, k=k) == items[:k]


@TASKS
@pytest.mark.parametrize(
    ("policy", "excluded", "kept"),
    [
        ("most_popular", "", "m"),
        ("most_popular", "m", "b"),
        ("most_popular", "mb", "z"),
        ("first", "", "z"),
        ("first", "z", "m"),
    ],
)
def test_one_item_of_a_sid_is_chosen_among_the_eligible_ones(
    nightshelf, tmp_path, task, policy, excluded, kept
):
    """B3, MiniOneRec #8, OpenOneRec #53, LETTER #21: which product of a SID is returned."""
    items = run_collisions(nightshelf, tmp_path, task, excluded, collisions=policy)
    assert sorted(items) == sorted([kept, "p", "q"])


@TASKS
def test_an_exclusion_takes_one_item_of_a_sid_and_leaves_the_others(nightshelf, tmp_path, task):
    """A23: eligibility is about items; the SID is dead only when all three are gone."""
    everything = run_collisions(nightshelf, tmp_path, task)
    some = run_collisions(nightshelf, tmp_path, task, "m")
    assert some == [item for item in everything if item != "m"]
    assert sorted(run_collisions(nightshelf, tmp_path, task, "mbz")) == ["p", "q"]


def test_the_choice_inside_a_sid_is_made_for_each_user(nightshelf, tmp_path):
    """B3: two users whose only candidates share one SID, and one excluded item."""
    users = ["u", "v", "w"]
    write(tmp_path, "users", {"user_id": users, "history": [["q"]] * 3})
    write(tmp_path, "catalog", {"item_id": ITEMS, "sid": SIDS})
    write(tmp_path, "candidates", {"user_id": users, "item_ids": [["b", "m", "z"]] * 3})
    write(tmp_path, "exclusions", {"user_id": ["v"], "item_id": ["z"]})
    task = {"k": 5, "collisions": "first", "score": {}}
    nightshelf("run", write_config(tmp_path, prompt__template="Hi {history}", task=task))
    chosen = published(tmp_path).select("user_id", "item_id").rows()
    assert chosen == [("u", "z"), ("v", "m"), ("w", "z")]


def test_popularity_that_is_null_or_nan_counts_as_none(nightshelf, tmp_path, monkeypatch):
    """B3: the choice inside a SID must not depend on how a missing popularity is written."""
    missing = [None, 1, float("nan"), 2.0, None]
    monkeypatch.setattr("tests.cases.test_catalogs.POPULARITY", missing)
    items = run_collisions(nightshelf, tmp_path, {"score": {}}, collisions="most_popular")
    assert sorted(items) == ["b", "p", "q"]


@pytest.mark.parametrize("form", ["tokens", "text", "spaced text", "dictionary", "dictionaries"])
def test_a_sid_means_the_same_in_every_form(nightshelf, tmp_path, form):
    """B5, GRID #11, KuaiSearch #11: SIDs could not be traced to item ids."""
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    want = published(tmp_path)
    assert want["item_id"].str.contains(r"^i\d{3}$").all()
    codes = tables["catalog"].column("sid").to_pylist()
    tokens = [[f"<a_{a}>", f"<b_{b}>", f"<c_{c}>"] for a, b, c in codes]
    sid = {
        "tokens": pa.array(tokens),
        "text": pa.array(["".join(one) for one in tokens]),
        "spaced text": pa.array([" ".join(one) for one in tokens]),
        "dictionary": pa.array(["".join(one) for one in tokens]).dictionary_encode(),
        "dictionaries": pa.array(tokens, pa.list_(pa.dictionary(pa.int32(), pa.string()))),
    }[form]
    write(tmp_path, "catalog", with_column(tables["catalog"], "sid", sid))
    nightshelf("run", config)
    assert_frame_equal(published(tmp_path), want)


def test_item_ids_are_returned_whatever_the_order_of_the_catalog(nightshelf, tmp_path):
    """B5: an item's id, and not a row number or a SID, whatever sorts where."""
    tables = write_inputs(tmp_path, int_ids=True, num_users=9)
    config = write_config(tmp_path)
    nightshelf("run", config)
    want = published(tmp_path)
    assert want.schema["item_id"] == pl.Int64
    assert want["item_id"].is_between(100, 159).all()
    write(tmp_path, "catalog", tables["catalog"].take(list(range(60))[::-1]))
    nightshelf("run", config)
    assert_frame_equal(published(tmp_path), want)


def test_everything_that_decides_a_result_is_in_the_manifest(nightshelf, tmp_path, model_folder):
    """B18, MiniOneRec #71, RQ-VAE-Recommender #28: published numbers could not be made again."""
    write_inputs(tmp_path, num_users=5)
    task = {"k": 4, "score_norm": "level", "collisions": "first", "score": {}}
    config = torch_config(
        tmp_path, model_folder, task={**task, "generate": {"width": [3, 5], "exact": True}}
    )
    summary = nightshelf("run", config, "--output", "json").json
    manifest = json.loads((Path(summary["run_dir"]) / "manifest.json").read_text())
    settings = manifest["plan"]["config"]
    assert settings["task"] == {
        "k": 4,
        "score_norm": "level",
        "collisions": "first",
        "k_column": None,
        "quota": None,
        "eligibility": None,
        "exclude_history": False,
        "score": {"all": False, "length_norm": "sum"},
        "generate": {
            "search": "auto",
            "max_positions": None,
            "mode": "constrained",
            "width": [3, 5],
            "exact": True,
            "max_width": 4096,
            "rescore": False,
            "compare_users": 0,
        },
        "label": None,
        "embed": None,
    }
    assert settings["engine"]["dtype"] == "float32"
    assert settings["engine"]["model"] == model_folder
    assert settings["prompt"]["template"] == "{history}"
    assert set(manifest["plan"]["hashes"]) >= {"config", "inputs", "model"}
    assert all(manifest["plan"]["hashes"][name] for name in ("config", "inputs", "model"))
    (file,) = manifest["plan"]["inputs"]["users"]["files"]
    assert file["rows"] == 5
    assert set(manifest["versions"]) >= {"nightshelf", "torch", "transformers", "tokenizers"}
    assert manifest["published"]["rows"] == summary["rows_published"]


@pytest.mark.parametrize(
    "change",
    ["task.score_norm=level", "task.collisions=first", "task.generate.width=9", "task.k=4"],
)
def test_any_setting_that_decides_a_result_makes_another_run(nightshelf, tmp_path, change):
    """B18: two results of different settings are never filed under one run."""
    write_inputs(tmp_path, num_users=5)
    config = write_config(tmp_path)
    plain = nightshelf("plan", config, "--output", "json").json
    changed = nightshelf("plan", config, "--set", change, "--output", "json").json
    assert changed["run_id"] != plain["run_id"]
    assert changed["hashes"]["config"] != plain["hashes"]["config"]
    assert changed["hashes"]["inputs"] == plain["hashes"]["inputs"]


def test_a_changed_weight_makes_another_run(nightshelf, tmp_path, model_folder):
    """B18: a model file replaced in place is another model, whatever its folder is called."""
    import shutil

    write_inputs(tmp_path, num_users=5)
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    config = torch_config(tmp_path, str(model))
    first = nightshelf("run", config, "--output", "json").json
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (model / "model.safetensors").write_bytes(bytes(weights))
    second = nightshelf("run", config, "--output", "json").json
    assert second["run_id"] != first["run_id"]
    rows = pl.read_parquet(tmp_path / "out/ds=2026-11-28/surface=home")
    assert rows["run_id"].unique().to_list() == [second["run_id"]]

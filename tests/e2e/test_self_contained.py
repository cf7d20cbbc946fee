"""A users table that is its own shards: the same rows as with prepared ones, and nothing joined."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from tests.cases.helpers import PARTITION, published
from tests.factories import write_config, write_inputs


def age(folder: Path) -> None:
    """Nothing was written here for ten days."""
    old = time.time() - 10 * 86400
    for path in folder.rglob("*"):
        os.utime(path, (old, old))


NO_JOIN = {
    "inputs__users": "whole",
    "inputs__candidates": None,
    "inputs__exclusions": None,
    "inputs__self_contained": True,
}


def write_whole(folder: Path, tables: dict[str, pa.Table], *, files: int, shuffle: bool) -> None:
    """The users with their candidates and exclusions, over several files."""
    frames = {name: pl.from_arrow(table) for name, table in tables.items()}
    excluded = frames["exclusions"].group_by("user_id").agg(excluded_item_ids="item_id")
    whole = frames["users"].join(frames["candidates"], on="user_id", how="left")
    whole = whole.join(excluded, on="user_id", how="left")
    whole = whole.sample(fraction=1.0, shuffle=True, seed=3) if shuffle else whole.sort("user_id")
    (folder / "whole").mkdir()
    for i in range(files):
        rows = whole.filter(pl.int_range(pl.len()) * files // pl.len() == i)
        pq.write_table(rows.to_arrow(), folder / "whole" / f"part-{i}.parquet")


TASKS = {
    "both": {"k": 5, "score": {}, "generate": {"width": 8}},
    "score": {"k": 5, "score": {}},
    "generate": {"k": 5, "generate": {"width": 8}},
    "label": {"k": 5, "label": {"labels": [1, 2]}},
}


@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.parametrize("int_ids", [False, True])
def test_files_as_shards_give_the_rows_of_prepared_ones(nightshelf, tmp_path, task, int_ids):
    tables = write_inputs(tmp_path, int_ids=int_ids)
    write_whole(tmp_path, tables, files=5, shuffle=True)
    changes = {"task": TASKS[task]}
    usual = nightshelf("run", write_config(tmp_path, **changes), "--output", "json").json
    expected = published(tmp_path, PARTITION)
    config = write_config(tmp_path, **changes, **NO_JOIN, output__path="out2")
    summary = nightshelf("run", config, "--output", "json").json
    assert_frame_equal(published(tmp_path, PARTITION.replace("out/", "out2/")), expected)
    assert summary["shards"] == 5
    assert sorted(p.name for p in (Path(summary["run_dir"]) / "shards").iterdir()) == ["_done"]
    for name in ("users_in", "users_recommended", "candidates_in", "candidates_scored"):
        assert summary[name] == usual[name]


@pytest.mark.parametrize("shape", ["shared", "segment"])
def test_sets_that_are_not_per_user_stay_a_table_of_their_own(nightshelf, tmp_path, shape):
    tables = write_inputs(tmp_path)
    write_whole(tmp_path, tables, files=3, shuffle=False)
    items = tables["catalog"]["item_id"].to_pylist()
    sets = {"item_id": items[:20]}
    if shape == "segment":
        sets = {"segment": ["s0", "s1", "s2"], "item_ids": [items[:9], items[5:20], items[30:]]}
    pq.write_table(pa.table(sets), tmp_path / "candidates.parquet")
    task = {"task": {"k": 5, "score": {}}}
    nightshelf("run", write_config(tmp_path, **task))
    expected = published(tmp_path, PARTITION)
    changes = {**NO_JOIN, "inputs__candidates": "candidates.parquet", "output__path": "out2"}
    nightshelf("run", write_config(tmp_path, **task, **changes, run__shard_users=20))
    assert_frame_equal(published(tmp_path, PARTITION.replace("out/", "out2/")), expected)


def test_bad_rows_are_set_aside_as_in_prepared_shards(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    users = tables["users"]
    users = pa.concat_tables([users, users.slice(3, 1)])  # u003 stands twice
    vectors = users["embedding"].to_pylist()
    vectors[8] = [float("nan")] * 4
    at = users.schema.get_field_index("embedding")
    users = users.set_column(at, "embedding", pa.array(vectors, pa.list_(pa.float32())))
    write_whole(tmp_path, {**tables, "users": users}, files=1, shuffle=False)
    config = write_config(tmp_path, **NO_JOIN, run__shard_users=50)
    summary = nightshelf("run", config, "--output", "json").json
    assert summary["users_in"] == 41
    assert summary["users_quarantined"] == 2
    assert "vector_not_finite" in nightshelf("show", config, "--user", "u008").out
    assert "Title" in nightshelf("show", config, "--user", "u003").out
    assert "not in the users table" in nightshelf("show", config, "--user", "nobody", check=3).err


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_user_in_two_files_is_refused(nightshelf, tmp_path, shuffle):
    tables = write_inputs(tmp_path)
    write_whole(tmp_path, tables, files=4, shuffle=shuffle)
    first = pq.read_table(tmp_path / "whole" / "part-0.parquet")
    pq.write_table(first.slice(2, 1), tmp_path / "whole" / "part-9.parquet")
    done = nightshelf("run", write_config(tmp_path, **NO_JOIN), check=3)
    assert "stands in two files" in done.err
    assert first["user_id"][2].as_py() in done.err
    assert "part-9.parquet" in done.err.replace("\n", "")
    found = nightshelf("validate", write_config(tmp_path, **NO_JOIN), "--output", "json", check=3)
    assert any("stands in two files" in problem["message"] for problem in found.json["problems"])
    assert not (tmp_path / "out").exists() or not (tmp_path / PARTITION).exists()


def test_a_struct_with_a_field_of_the_same_name_hides_nobody(nightshelf, tmp_path):
    """Leaves of a Parquet file may share a name; statistics of another one prove nothing."""
    tables = write_inputs(tmp_path)
    write_whole(tmp_path, tables, files=4, shuffle=True)
    for i in range(4):
        path = tmp_path / "whole" / f"part-{i}.parquet"
        rows = pq.read_table(path)
        other = pa.array([{"user_id": f"{i}-{n}"} for n in range(len(rows))])
        pq.write_table(rows.add_column(0, "meta", other), path)
    nightshelf("plan", write_config(tmp_path, **NO_JOIN))
    pq.write_table(rows.slice(2, 1), tmp_path / "whole" / "part-9.parquet")
    done = nightshelf("run", write_config(tmp_path, **NO_JOIN), check=3)
    assert "stands in two files" in done.err


def test_what_does_not_fit_self_contained_is_refused(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    write_whole(tmp_path, tables, files=2, shuffle=False)
    done = nightshelf("run", write_config(tmp_path, **NO_JOIN), check=3)
    assert "a file is too large to be a shard" in done.err
    assert "20 rows" in done.err
    roomy = {**NO_JOIN, "run__shard_users": 20}
    with_table = {**roomy, "inputs__candidates": "candidates.parquet"}
    done = nightshelf("run", write_config(tmp_path, **with_table), check=3)
    assert "not joined with inputs.self_contained" in done.err
    excluded = {**roomy, "inputs__exclusions": "exclusions.parquet"}
    done = nightshelf("run", write_config(tmp_path, **excluded), check=2)
    assert "excluded_item_ids" in done.err
    found = nightshelf(
        "validate", write_config(tmp_path, **with_table), "--output", "json", check=3
    )
    assert [p["field"] for p in found.json["problems"]] == ["inputs.candidates"]
    found = nightshelf("validate", write_config(tmp_path, **NO_JOIN), "--output", "json", check=3)
    assert [p["field"] for p in found.json["problems"]] == ["run.shard_users"]
    nightshelf("validate", write_config(tmp_path, **roomy))
    bare = {**roomy, "inputs__users": "users.parquet", "run__shard_users": 40}
    done = nightshelf("run", write_config(tmp_path, **bare), check=3)
    assert "'item_ids' is missing" in done.err


def test_a_file_that_is_replaced_during_the_run_is_noticed(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    write_whole(tmp_path, tables, files=2, shuffle=False)
    config = write_config(tmp_path, **NO_JOIN, run__shard_users=20)
    run_id = nightshelf("prepare", config, "--output", "json").json["run_id"]
    path = tmp_path / "whole" / "part-1.parquet"
    rows = pq.read_table(path)
    pq.write_table(rows.slice(1), path)
    done = nightshelf("score", config, "--run-id", run_id, check=4)
    assert "has changed since the run was planned" in done.err
    assert "part-1.parquet" in done.err.replace("\n", "")
    assert nightshelf("run", config, "--output", "json").json["users_in"] == 39


def test_columns_that_a_run_does_not_read_may_hold_anything(nightshelf, tmp_path):
    """A history of another type is no concern of a prompt without one."""
    tables = write_inputs(tmp_path)
    users = tables["users"].drop_columns(["history"])
    users = users.append_column("history", pa.array([[1, 2]] * 40))
    users = users.append_column("item_ids", pa.array([[1.5]] * 40))
    pq.write_table(users, tmp_path / "users.parquet")
    config = write_config(tmp_path, prompt={"template": "Hi {user_vector}"})
    assert nightshelf("run", config, "--output", "json").json["status"] == "published"


def test_such_a_run_is_judged_as_any_other(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    write_whole(tmp_path, tables, files=5, shuffle=True)
    as_json = ("--output", "json")
    usual = nightshelf("run", write_config(tmp_path), *as_json).json
    config = write_config(tmp_path, **NO_JOIN, output__path="out2")
    own = nightshelf("run", config, *as_json).json
    pages = [(Path(run["run_dir"]) / "report.html").read_text() for run in (usual, own)]
    shown = [json.loads(re.search(r'id="examples">(.*?)</script>', p)[1])["users"] for p in pages]
    histories = [{user["id"]: user["history_items"] for user in users} for users in shown]
    assert histories[0] == histories[1]
    assert min(histories[1].values()) > 0
    users = [*tables["users"]["user_id"].to_pylist(), "a stranger"]
    items = tables["catalog"]["item_id"].to_pylist()
    truth = pa.table({"user_id": users, "item_ids": [items[i : i + 9] for i in range(len(users))]})
    pq.write_table(truth, tmp_path / "truth.parquet")
    args = ("--truth", tmp_path / "truth.parquet", "--by", "segment", "--bootstrap", "0", *as_json)
    judged = [nightshelf("evaluate", run["run_dir"], *args).json for run in (usual, own)]
    assert judged[0]["users"] == judged[1]["users"]
    assert judged[0]["users"]["in_run"] == 40
    for one, other in zip(*(j["segments"] for j in judged), strict=True):
        assert one["segment"] == other["segment"]
        for metric, found in one["methods"]["run"].items():
            assert other["methods"]["run"][metric]["value"] == pytest.approx(found["value"])
    for pair in ((usual, own), (own, usual), (own, own)):
        same = nightshelf("compare", *(run["run_dir"] for run in pair), *as_json).json
        assert same["users"]["same_list"] == same["users"]["both"] == own["users_recommended"]
    path = tmp_path / "whole" / "part-1.parquet"  # the next night's users, at the same place
    pq.write_table(pq.read_table(path).slice(1), path)
    done = nightshelf("compare", own["run_dir"], usual["run_dir"], check=4)
    assert "has changed since the run was planned" in done.err


def test_gc_keeps_a_copied_table_that_is_the_shards_of_a_run(nightshelf, tmp_path):
    """Tables of Spark's catalog are copied below the work folder; here by hand."""
    tables = write_inputs(tmp_path)
    write_whole(tmp_path, tables, files=5, shuffle=False)
    copy = tmp_path / "runs" / "tables" / "users-abc"
    copy.parent.mkdir(parents=True)
    (tmp_path / "whole").rename(copy)
    config = write_config(tmp_path, **{**NO_JOIN, "inputs__users": "runs/tables/users-abc"})
    first = nightshelf("run", config, "--output", "json").json
    gc = ("gc", config, "--keep", "0", "--output", "json")
    assert nightshelf(*gc).json["removed"] == [], "it was published just now"
    age(Path(first["run_dir"]))
    age(copy)
    second = nightshelf("run", config, "--set", "engine.seed=3", "--output", "json").json
    assert [one["run_id"] for one in nightshelf(*gc).json["removed"]] == [first["run_id"]]
    assert len(list(copy.iterdir())) == 5, "the present run reads it"
    age(Path(second["run_dir"]))
    told = nightshelf(*gc, "--dry-run").json["removed"]
    assert [one["run_id"] for one in told] == [second["run_id"], "tables/users-abc"]
    assert nightshelf(*gc).json["removed"] == told
    assert not copy.exists()
    assert list(Path(second["run_dir"]).glob("staged/*.parquet")), "readers see this run"

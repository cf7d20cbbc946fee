"""What goes wrong at the edges of tasks, audits and work folders: each was once wrong."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from tests.cases.helpers import published, staged, torch_config, with_column, write
from tests.factories import tiny_model, write_config, write_inputs


def counts_of(summary):
    return json.loads((Path(summary["run_dir"]) / "manifest.json").read_text())["counts"]


# --- labels ---------------------------------------------------------------------------------------


def test_a_rejected_user_takes_nobody_along(nightshelf, tmp_path):
    """Its unknown label was read as token 0, so that it stood for the users who ask for that."""
    tables = write_inputs(tmp_path, num_users=5)
    users = with_column(tables["users"], "mine", [[9999999, 97], [0, 97], None, [0, 97], []])
    users = with_column(users, "history", [["i001"]] * 5)
    users = with_column(users, "embedding", [[1.0, 2.0, 3.0, 4.0]] * 5)
    write(tmp_path, "users", users)
    write(tmp_path, "candidates", {"item_id": ["i003", "i004"]})
    label = {"labels": ["y", "n"], "labels_column": "mine"}
    config = write_config(tmp_path, task={"label": label}, inputs__exclusions=None)
    summary = nightshelf("run", config, "--output", "json").json
    assert (summary["users_recommended"], summary["users_quarantined"]) == (4, 1)
    rows = published(tmp_path)
    assert rows.group_by("user_id").len()["len"].to_list() == [2] * 4


def test_a_null_among_labels_is_a_row_set_aside(nightshelf, tmp_path):
    tables = write_inputs(tmp_path, num_users=3)
    mine = pa.array([["a", None], ["a", "b"], None], pa.list_(pa.string()))
    write(tmp_path, "users", tables["users"].append_column("mine", mine))
    label = {"labels": ["y", "n"], "labels_column": "mine"}
    summary = nightshelf(
        "run", write_config(tmp_path, task={"label": label}), "--output", "json"
    ).json
    bad = staged(summary, "quarantine").filter(pl.col("table") == "users")
    assert bad.select("key", "rule").rows() == [("u000", "label_unknown")]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([True, False], "put them in quotes"),
        (["y", 121], "the same token"),
        ([-1, 5], "not one token"),
        (["y", "yes"], "not one token"),
    ],
)
def test_labels_that_mean_something_else_are_refused_in_time(nightshelf, tmp_path, labels, words):
    write_inputs(tmp_path)
    config = write_config(tmp_path, task={"label": {"labels": labels}})
    assert words in nightshelf("plan", config, check=2).err


def test_labels_of_one_user_leave_the_bits_of_another_alone(nightshelf, tmp_path):
    """Torch, float32: the labels of a shard decided the shape of a matmul."""
    model = tmp_path / "model"
    model.mkdir()
    tiny_model(model)
    tables = write_inputs(tmp_path, num_users=9)
    label = {"labels": [20, 21], "labels_column": "mine"}
    rows = {}
    for name, first in (("few", [20, 21]), ("many", list(range(20, 38)))):
        mine = [first, *([[22, 23]] * 8)]
        write(tmp_path, "users", with_column(tables["users"], "mine", mine))
        nightshelf("run", torch_config(tmp_path, str(model), task={"k": 30, "label": label}))
        rows[name] = published(tmp_path).filter(pl.col("user_id") != "u000")
    assert_frame_equal(rows["few"], rows["many"])


# --- segments and shared sets ---------------------------------------------------------------------


def test_segments_of_another_type_are_refused_and_floats_find_each_other(nightshelf, tmp_path):
    tables = write_inputs(tmp_path, num_users=6)
    users = tables["users"].drop_columns(["segment"])
    sets = {"item_ids": [["i001", "i002"], ["i003"]]}
    write(tmp_path, "users", users.append_column("segment", pa.array([0.0, 1.0] * 3)))
    write(tmp_path, "candidates", {"segment": [0, 1], **sets})
    config = write_config(tmp_path, task={"score": {}}, inputs__exclusions=None)
    assert "segments have another type" in nightshelf("plan", config, check=3).err
    write(tmp_path, "candidates", {"segment": [0.0, 1.0], **sets})
    assert nightshelf("run", config, "--output", "json").json["users_recommended"] == 6


def test_a_set_of_no_segment_is_nobodys(nightshelf, tmp_path):
    write_inputs(tmp_path, num_users=6)
    null = pa.array([None], pa.string())
    write(tmp_path, "candidates", pa.table({"segment": null, "item_ids": [["i001"]]}))
    config = write_config(tmp_path, task={"score": {}}, audit={"allow_empty": True})
    summary = nightshelf("run", config, "--output", "json").json
    assert (summary["users_recommended"], summary["candidates_in"]) == (0, 0)


def test_candidates_of_users_set_aside_are_unused_whatever_the_shape(nightshelf, tmp_path):
    tables = write_inputs(tmp_path, num_users=6)
    vectors = tables["users"]["embedding"].to_pylist()
    vectors[2] = [math.nan] * 4
    write(tmp_path, "users", with_column(tables["users"], "embedding", vectors))
    config = write_config(tmp_path, task={"score": {}}, inputs__exclusions=None)
    items = ["i001", "i002", "i003", "i004"]
    write(tmp_path, "candidates", {"user_id": [f"u{u:03d}" for u in range(6)],
                                   "item_ids": [items] * 6})  # fmt: skip
    own = counts_of(nightshelf("run", config, "--output", "json").json)
    write(tmp_path, "candidates", {"item_id": items})
    shared = counts_of(nightshelf("run", config, "--output", "json").json)
    assert own == shared
    assert (shared["candidates_in"], shared["candidates_unused"]) == (24, 4)


# --- audits ---------------------------------------------------------------------------------------


def test_ids_may_change_their_type_between_runs(nightshelf, tmp_path):
    write_inputs(tmp_path)
    nightshelf("run", write_config(tmp_path), "--ds", "2026-11-27")
    tables = write_inputs(tmp_path, int_ids=True)
    users = tables["users"]
    write(tmp_path, "users", users)
    nightshelf("run", write_config(tmp_path))


def test_no_rows_at_all_pass_no_limit_on_rows(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 5, "score": {}})
    nightshelf("run", config, "--ds", "2026-11-27")
    write(tmp_path, "candidates", {"item_id": ["nowhere"]})
    limits = {"min_rows": 5, "min_rows_p5": 5, "min_overlap": 0.9, "max_score_drift": 0.5}
    config = write_config(tmp_path, task={"k": 5, "score": {}}, audit=limits)
    err = nightshelf("run", config, check=6).err
    for gate in ("rows_min is 0", "rows_p5 is 0", "overlap is 0", "score_drift is"):
        assert gate in err


@pytest.mark.parametrize(
    ("task", "audit", "words"),
    [
        ({"score": {}}, {"min_exact_share": 1.0}, "audit.min_exact_share needs task.generate"),
        ({"embed": {}}, {"min_rows": 5}, "audit.min_rows is about lists"),
        (
            {"generate": {}, "score_norm": "trie"},
            {"min_legal_mass": 0.5},
            "audit.min_legal_mass needs task.score_norm",
        ),
    ],
)
def test_a_limit_that_nothing_is_held_against_is_refused(nightshelf, tmp_path, task, audit, words):
    write_inputs(tmp_path)
    assert words in nightshelf("plan", write_config(tmp_path, task=task, audit=audit), check=2).err


def test_files_that_changed_after_the_audit_are_not_published(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    run_dir = nightshelf("prepare", config, "--output", "json").json["run_dir"]
    nightshelf("score", run_dir)
    nightshelf("audit", run_dir)
    file = sorted(Path(run_dir).glob("staged/*-recommendations.parquet"))[0]
    pl.read_parquet(file).with_columns(item_id=pl.lit("EVIL")).write_parquet(file)
    assert "not every shard is scored" in nightshelf("publish", run_dir, check=4).err
    assert not (tmp_path / "out/ds=2026-11-28").exists()


# --- steps, work folders --------------------------------------------------------------------------


def test_a_planned_run_keeps_its_model_and_its_settings(nightshelf, tmp_path):
    write_inputs(tmp_path)
    models = [tmp_path / "model", tmp_path / "other"]
    for seed, model in enumerate(models):
        model.mkdir()
        tiny_model(model, seed=seed)
    config = torch_config(tmp_path, str(models[0]))
    run_dir = nightshelf("prepare", config, "--output", "json").json["run_dir"]
    err = nightshelf("score", run_dir, "--ds", "2020-01-01", check=2).err
    assert "cannot change a run that is planned" in err
    run_id = Path(run_dir).name
    err = nightshelf("audit", config, "--run-id", run_id, "--set", "audit.min_rows=9", check=2).err
    assert "cannot change a run that is planned" in err
    shutil.copy(models[1] / "model.safetensors", models[0] / "model.safetensors")
    assert "the model has changed" in nightshelf("score", run_dir, check=4).err


def test_two_tables_of_one_work_folder_do_not_meet(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    other = ("--set", f"output.path={tmp_path / 'second'}")
    nightshelf("run", config)
    days = ("backfill", config, "--from", "2026-11-28", "--to", "2026-11-28", "--dry-run")
    assert nightshelf(*days, "--output", "json").json["days"][0]["state"] == "skipped"
    assert nightshelf(*days, *other, "--output", "json").json["days"][0]["state"] == "planned"
    nightshelf("run", config, *other, "--set", "engine.seed=3")
    nightshelf("gc", config, "--older-than-days", "0", "--keep", "0", "--output", "json")
    assert len(list((tmp_path / "runs").glob("*/staged"))) == 2, "each holds its partition"
    states = [
        run["status"] for run in nightshelf("status", config, "--output", "json").json["runs"]
    ]
    assert states == ["published", "published"]


def test_a_published_run_stays_published_when_it_is_tried_again(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    nightshelf("run", config, "--set", "audit.min_rows=99", check=6)
    (run,) = nightshelf("status", config, "--output", "json").json["runs"]
    assert run["status"] == "published"


@pytest.mark.parametrize("text", ["{}", '{"run_id": '])
def test_one_folder_that_cannot_be_read_hides_no_other(nightshelf, tmp_path, text):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    (tmp_path / "runs" / "strange").mkdir()
    (tmp_path / "runs" / "strange" / "plan.json").write_text(text)
    runs = nightshelf("status", config, "--output", "json").json["runs"]
    assert sorted(run["status"] for run in runs) == ["published", "unreadable"]
    nightshelf("gc", config)
    assert "cannot be read" in nightshelf("score", tmp_path / "runs/strange", check=4).err or text


def test_a_lost_shard_is_made_again(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    run_dir = Path(nightshelf("prepare", config, "--output", "json").json["run_dir"])
    nightshelf("run", config, "--set", f"output.path={tmp_path / 'whole'}")
    (run_dir / "shards" / "shard-00002.parquet").unlink()
    nightshelf("run", config)
    want = pl.read_parquet(tmp_path / "whole/ds=2026-11-28/surface=home").drop("run_id")
    assert_frame_equal(published(tmp_path), want.sort("user_id", "rank"))


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task__k": True}, "task.k"),
        ({"task__generate": {"width": True}}, "task.generate.width"),
        ({"task__k": 10**12}, "task.k"),
        ({"run__price_per_hour": math.inf}, "run.price_per_hour"),
        ({"run__work_dir": "runs/{ds}"}, "run.work_dir depends on the date"),
        ({"surface": "s" * 300}, "surface"),
        ({"task__generate": {"width": [3, 4, 5, 6]}}, "too long"),
        ({"sid__end_token": ""}, "sid.end_token"),
    ],
)
def test_nonsense_in_a_configuration_is_refused(nightshelf, tmp_path, changes, words):
    write_inputs(tmp_path)
    assert words in nightshelf("plan", write_config(tmp_path, **changes), check=2).err


def test_an_end_token_that_is_a_code_is_found_by_the_check_too(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, sid__end_token="<a_1>")
    assert "same token id" in nightshelf("plan", config, check=3).err
    assert "token_twice" in nightshelf("catalog", "check", config, check=3).out


def test_metrics_that_cannot_be_written_are_known_before(nightshelf, tmp_path):
    write_inputs(tmp_path)
    (tmp_path / "metrics").write_text("a file")
    config = write_config(tmp_path, run__metrics_dir="metrics")
    assert "run.metrics_dir is not writable" in nightshelf("run", config, check=2).err


def test_an_error_is_a_json_line_where_logs_are(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, audit={"min_rows": 99})
    done = nightshelf("run", config, "--log-format", "json", check=6)
    events = [json.loads(line) for line in done.err.splitlines()]
    assert events[-1]["event"] == "error"
    assert events[-1]["exit_code"] == 6


def test_a_column_of_durations_is_no_slot(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    lasting = pa.array([1] * 40, pa.duration("s"))
    pq.write_table(tables["users"].append_column("age", lasting), tmp_path / "users.parquet")
    config = write_config(tmp_path, prompt__template="{age}{history}")
    assert "'age' has the wrong type" in nightshelf("plan", config, check=3).err


def test_too_many_segments_are_refused_before_memory_is_gone(nightshelf, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.inputs.eligibility._MOST_CELLS", 5 * 60)
    tables = write_inputs(tmp_path)
    write(tmp_path, "catalog", with_column(tables["catalog"], "price", list(range(60))))
    users = tables["users"]
    config = write_config(tmp_path, task={"generate": {}, "eligibility": "price < {user.limit}"})
    write(tmp_path, "users", with_column(users, "limit", [u % 4 + 20 for u in range(40)]))
    nightshelf("run", config)
    write(tmp_path, "users", with_column(users, "limit", list(range(20, 60))))
    for command in ("validate", "plan", "run"):
        done = nightshelf(command, config, "--output", "json", check=3)
        assert "too many segments" in done.out
        assert "lower run.shard_users" in done.out
    nightshelf("run", config, "--set", "run.shard_users=1")

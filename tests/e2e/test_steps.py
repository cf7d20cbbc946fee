"""Audit gates over whole runs, the steps of a run one by one, backfills, and cleaning up."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal

from schemas.errors import AccessError, RunError, StorageError, TableError
from tests.factories import SIZES, write_config, write_inputs

PARTITION = "out/ds=2026-11-28/surface=home"


def gates_of(summary):
    manifest = json.loads((Path(summary["run_dir"]) / "manifest.json").read_text())
    return {gate["gate"]: gate for gate in manifest["audit"]["gates"]}


# --- gates ----------------------------------------------------------------------------------------


def test_gates_without_limits_report_what_they_measure(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 5, "generate": {"width": 8}})
    gates = gates_of(nightshelf("run", config, "--output", "json").json)
    assert gates["rows_min"]["value"] == gates["rows_p5"]["value"] == 5
    assert 0 <= gates["exact_share"]["value"] <= 1
    assert 0 <= gates["legal_mass"]["value"] <= 1
    assert all(gate["passed"] for gate in gates.values())
    for name in ("score_drift", "overlap", "row_change"):
        assert gates[name]["value"] is None
        assert "nothing was published before" in gates[name]["detail"]


def test_a_run_is_held_against_the_one_published_before(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 5, "generate": {"width": 60}})
    nightshelf("run", config, "--ds", "2026-11-26")
    same = gates_of(nightshelf("run", config, "--ds", "2026-11-27", "--output", "json").json)
    assert same["score_drift"]["value"] == pytest.approx(0)
    assert same["overlap"]["value"] == 1
    assert same["row_change"]["value"] == 0
    other = ("--set", "engine.seed=9", "--set", "task.k=10", "--output", "json")
    changed = gates_of(nightshelf("run", config, "--ds", "2026-11-28", *other).json)
    assert changed["overlap"]["value"] < 0.5
    assert changed["row_change"]["value"] == pytest.approx(1, abs=0.2)
    assert "2026-11-27-home" in changed["overlap"]["detail"]
    # A backfill of an earlier day is held against what was published before that day.
    early = gates_of(nightshelf("run", config, "--ds", "2026-11-25", "--output", "json").json)
    assert early["overlap"]["value"] is None


@pytest.mark.parametrize(
    ("limit", "gate"),
    [
        ({"min_rows": 6}, "rows_min"),
        ({"min_rows_p5": 6}, "rows_p5"),
        ({"min_exact_share": 1.0}, "exact_share"),
        ({"min_legal_mass": 0.99}, "legal_mass"),
        ({"max_score_drift": 0.0}, "score_drift"),
        ({"min_overlap": 0.99}, "overlap"),
        ({"max_row_change": 0.1}, "row_change"),
        ({"min_coverage": 1.0}, "coverage"),
        ({"max_quarantine_rate": 0.0}, "quarantine_rate"),
    ],
)
def test_each_limit_refuses_or_warns(nightshelf, tmp_path, limit, gate):
    tables = write_inputs(tmp_path)
    first = write_config(tmp_path, task={"k": 8, "generate": {"width": 9}}, engine__seed=4)
    nightshelf("run", first, "--ds", "2026-11-27")
    users = tables["users"]
    twice = pa.concat_tables([users, users.slice(0, 1)])  # one row for the quarantine
    pq.write_table(twice, tmp_path / "users.parquet")
    task = {"k": 5, "generate": {"search": "beam", "width": 2}}
    config = write_config(tmp_path, task=task, audit=limit)
    done = nightshelf("run", config, "--output", "json", check=6)
    assert gate in done.json["error"]["message"]
    assert not (tmp_path / PARTITION).exists()
    warned = nightshelf("run", config, "--set", f"audit.warn=[{gate}]", "--output", "json")
    assert warned.json["audit_warnings"] == [gate]
    assert f"audit: {gate} is" in warned.err
    assert gates_of(warned.json)[gate]["action"] == "warn"
    assert (tmp_path / PARTITION / "_SUCCESS").exists()


def test_a_gate_that_must_hold_cannot_be_made_to_warn(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, audit={"warn": ["conservation"]})
    assert "audit.warn" in nightshelf("plan", config, check=2).err


# --- steps ----------------------------------------------------------------------------------------


def test_steps_one_by_one_publish_what_a_run_does(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config, "--set", f"output.path={tmp_path / 'whole'}")
    want = pl.read_parquet(tmp_path / "whole/ds=2026-11-28/surface=home").drop("run_id")
    prepared = nightshelf("prepare", config, "--output", "json").json
    run = ("--run-id", prepared["run_id"], "--output", "json")
    assert "not every shard is scored" in nightshelf("publish", config, *run, check=4).err
    scored = nightshelf("score", config, *run).json
    assert scored["rows"] == len(want)
    assert "has not been audited" in nightshelf("publish", config, *run, check=4).err
    audited = nightshelf("audit", prepared["run_dir"], "--output", "json").json
    assert audited["status"] == "passed"
    published = nightshelf("publish", config, *run).json
    assert published["rows_published"] == len(want)
    assert_frame_equal(pl.read_parquet(tmp_path / PARTITION).drop("run_id"), want)
    for step in ("prepare", "score", "audit", "publish"):
        nightshelf(step, prepared["run_dir"])  # each may be retried
    assert_frame_equal(pl.read_parquet(tmp_path / PARTITION).drop("run_id"), want)


def test_a_step_stays_in_its_run_when_the_input_changes(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    prepared = nightshelf("prepare", config, "--output", "json").json
    write_inputs(tmp_path, seed=1)
    scored = nightshelf("score", config, "--run-id", prepared["run_id"], "--output", "json").json
    assert scored["run_id"] == prepared["run_id"]


def test_a_planned_run_takes_the_settings_it_was_planned_with_and_no_others(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    mine = ("--ds", "2026-11-27", "--set", "surface=email", "--set", "task.k=3")
    prepared = nightshelf("prepare", config, *mine, "--output", "json").json
    run = ("--run-id", prepared["run_id"])
    assert nightshelf("score", config, *mine, *run, "--output", "json").json["rows"] > 0
    nightshelf("audit", prepared["run_dir"], "--ds", "2026-11-27")
    for other, named in (
        (("--ds", "2026-11-28"), "--ds 2026-11-28"),
        (("--set", "task.k=4"), "task.k=4"),
        (("--set", "audit.min_rows=2"), "audit.min_rows=2"),
    ):
        err = nightshelf("publish", config, *run, *other, check=2).err
        assert "cannot change a run that is planned" in err
        assert f"got {named}" in err
    assert (
        "got --ds" in nightshelf("publish", prepared["run_dir"], "--ds", "2026-11-28", check=2).err
    )
    work_dir = ("--set", f"run.work_dir={tmp_path}/./runs")  # the same folder, by another name
    assert (
        nightshelf("publish", config, *run, *work_dir, "--output", "json").json["ds"]
        == "2026-11-27"
    )


def test_a_plan_says_what_the_date_s_state_is(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    plan = ("plan", config, "--output", "json")
    assert nightshelf(*plan).json["before"] == "none"
    nightshelf("run", config, "--set", "audit.min_rows=30", check=6)
    assert nightshelf(*plan).json["before"] == "refused"
    nightshelf("run", config, "--set", "task.k=4")
    assert nightshelf(*plan).json["before"] == "published"
    assert nightshelf(*plan, "--ds", "2026-11-29").json["before"] == "none"
    assert nightshelf(*plan, "--set", "surface=email").json["before"] == "none"


def test_a_refused_audit_shows_its_gates_and_publish_keeps_to_it(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, audit={"min_rows": 30})
    prepared = nightshelf("prepare", config, "--output", "json").json
    nightshelf("score", prepared["run_dir"])
    done = nightshelf("audit", prepared["run_dir"], check=6)
    assert "rows_min" in done.out
    assert "refuse" in done.out
    assert "rows_min is 5" in nightshelf("publish", prepared["run_dir"], check=6).err
    assert not (tmp_path / PARTITION).exists()
    assert nightshelf("status", prepared["run_dir"], "--output", "json").json["runs"][0][
        "status"
    ] == ("refused")


def test_logs_may_be_json_lines(nightshelf, tmp_path):
    write_inputs(tmp_path)
    done = nightshelf("run", write_config(tmp_path), "--log-format", "json")
    events = [json.loads(line) for line in done.err.splitlines()]
    assert [e["step"] for e in events if e["event"] == "step"] == [
        "plan", "prepare", "score", "audit", "publish", "report",
    ]  # fmt: skip
    assert all("ts" in event for event in events)


# --- backfill -------------------------------------------------------------------------------------


def daily(folder, days):
    tables = write_inputs(folder, num_users=8)
    for day in days:
        (folder / "users" / day).mkdir(parents=True)
        pq.write_table(tables["users"], folder / "users" / day / "users.parquet")
    config = write_config(folder)
    text = config.read_text().replace("users: users.parquet", "users: users/{ds}/")
    config.write_text(text.replace("ds: '2026-11-28'\n", ""))
    return config


def test_a_backfill_publishes_what_it_can_and_repairs_the_rest(nightshelf, tmp_path):
    days = [f"2026-11-0{n}" for n in range(1, 6)]
    config = daily(tmp_path, days)
    poison = tmp_path / "users" / days[2] / "users.parquet"
    good = poison.read_bytes()
    poison.write_bytes(b"")
    args = ("backfill", config, "--from", days[0], "--to", days[4], "--output", "json")
    planned = nightshelf(*args, "--dry-run").json["days"]
    assert [day["state"] for day in planned] == ["planned"] * 5
    assert not (tmp_path / "out").exists()
    done = nightshelf(*args, "--max-active", "2", check=4)
    found = [json.loads(line) for line in done.out.splitlines()]
    states = {day["ds"]: day for day in found[0]["days"]}
    assert [states[d]["state"] for d in days] == [
        "published", "published", "failed", "published", "published",
    ]  # fmt: skip
    assert states[days[2]]["exit_code"] == 3
    assert "0 bytes" in states[days[2]]["message"]
    assert days[2] in found[1]["error"]["message"]
    published = {p.name: p.stat().st_mtime for p in (tmp_path / "out").glob("ds=*")}
    assert sorted(published) == [f"ds={d}" for d in days if d != days[2]]
    poison.write_bytes(good)
    again = nightshelf(*args, "--reprocess", "failed").json["days"]
    assert [day["state"] for day in again] == [
        "skipped", "skipped", "published", "skipped", "skipped",
    ]  # fmt: skip
    left = nightshelf(*args).json["days"]
    assert {day["state"] for day in left} == {"skipped"}


def test_a_backfill_goes_backwards_when_asked_and_refuses_nonsense(nightshelf, tmp_path):
    config = daily(tmp_path, ["2026-11-01", "2026-11-02"])
    args = ("backfill", config, "--from", "2026-11-01", "--to", "2026-11-02", "--dry-run")
    days = nightshelf(*args, "--backwards", "--output", "json").json["days"]
    assert [day["ds"] for day in days] == ["2026-11-02", "2026-11-01"]
    assert "planned" in nightshelf(*args).out
    wrong = ("backfill", config, "--from", "2026-11-02", "--to", "2026-11-01")
    assert "--to is before --from" in nightshelf(*wrong, check=2).err
    assert (
        "must be dates" in nightshelf("backfill", config, "--from", "x", "--to", "y", check=2).err
    )
    nightshelf(*args, "--reprocess", "maybe", check=2)


# --- gc -------------------------------------------------------------------------------------------


def age(run_dir):
    """Nothing was written here for ten days."""
    old = time.time() - 10 * 86400
    for path in Path(run_dir).rglob("*"):
        os.utime(path, (old, old))


def test_gc_keeps_what_is_published_and_what_it_could_roll_back_to(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    runs = []
    for seed in range(4):
        done = nightshelf("run", config, "--set", f"engine.seed={seed}", "--output", "json").json
        runs.append(Path(done["run_dir"]))
    abandoned = nightshelf("prepare", config, "--set", "engine.seed=9", "--output", "json").json
    assert nightshelf("gc", config, "--output", "json").json["removed"] == [], "made just now"
    for run in [*runs, abandoned["run_dir"]]:
        age(run)
    want = pl.read_parquet(tmp_path / PARTITION)
    told = nightshelf("gc", config, "--dry-run", "--output", "json").json["removed"]
    assert {r["run_id"] for r in told} == {*(run.name for run in runs), abandoned["run_id"]}
    assert all((run / "shards").exists() for run in runs)
    assert all((run / "staged").exists() for run in runs)
    nightshelf("gc", config, "--older-than-days", "30")
    assert all((run / "staged").exists() for run in runs)
    assert runs[0].name in nightshelf("gc", config).out
    assert [(run / "staged").exists() for run in runs] == [False, False, True, True]
    assert not any((run / "shards").exists() for run in runs), "derived, also of what is published"
    assert all((run / "manifest.json").exists() for run in runs)
    assert_frame_equal(pl.read_parquet(tmp_path / PARTITION), want)
    user = want["user_id"][0]
    assert nightshelf("show", config, "--user", user, "--output", "json").json["items"]
    nightshelf("run", config, "--set", "engine.seed=0")  # from the beginning, and right
    again = nightshelf("gc", config, "--output", "json").json["removed"]
    assert [r["run_id"] for r in again] == [runs[2].name], "two runs back now"


# --- estimates and metrics ------------------------------------------------------------------------


def test_a_plan_estimates_what_the_run_then_takes(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, run__price_per_hour=3600)
    before = nightshelf("plan", config, "--output", "json").json["estimate"]
    assert before["device_hours"] is None
    assert "no run to take the speed from" in nightshelf("plan", config).out
    summary = nightshelf("run", config, "--output", "json").json
    assert before["users"] == summary["users_in"]
    assert before["candidates"] == summary["candidates_in"]
    assert before["prompt_tokens"] == pytest.approx(summary["prompt_tokens"], rel=0.02)
    assert summary["rows_forwarded"] <= before["rows_forwarded"] * 1.02
    after = nightshelf("plan", config, "--output", "json").json["estimate"]
    rate = summary["rows_forwarded"] / summary["device_hours"]
    assert after["device_hours"] == pytest.approx(after["rows_forwarded"] / rate, abs=2e-4)
    assert after["cost"] == pytest.approx(3600 * after["device_hours"], abs=0.5)
    assert summary["run_id"] in nightshelf("plan", config).out


@pytest.mark.parametrize("shape", ["long", "shared", "segment"])
def test_an_estimate_counts_candidates_of_every_shape(nightshelf, tmp_path, shape):
    tables = write_inputs(tmp_path)
    items = tables["catalog"]["item_id"].to_pylist()
    sets = {
        "long": {"user_id": ["u001"] * 7, "item_id": items[:7]},
        "shared": {"item_id": items[:7]},
        "segment": {"segment": ["s0", "s1", "s2"], "item_ids": [items[:7]] * 3},
    }
    pq.write_table(pa.table(sets[shape]), tmp_path / "candidates.parquet")
    config = write_config(tmp_path, task={"score": {}})
    found = nightshelf("plan", config, "--output", "json").json["estimate"]
    summary = nightshelf("run", config, "--output", "json").json
    assert found["candidates"] == summary["candidates_in"]


def test_an_estimate_of_a_model_says_what_memory_it_takes(nightshelf, tmp_path, model_folder):
    from tests.cases.helpers import torch_config

    write_inputs(tmp_path)
    config = torch_config(tmp_path, model_folder, engine__max_batch_tokens=100)
    found = nightshelf("plan", config, "--output", "json").json["estimate"]
    assert found["pack_bytes"] == 100 * 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width
    weights = sum(p.stat().st_size for p in Path(model_folder).glob("*.safetensors"))
    assert found["model_bytes"] == weights
    assert "memory of the device" in nightshelf("plan", config).out
    config = torch_config(tmp_path, model_folder, engine__dtype="bfloat16")
    found = nightshelf("plan", config, "--output", "json").json["estimate"]
    assert found["model_bytes"] == weights + sum(SIZES) * 32 * 4  # their rows of the head, float32


def test_metrics_of_a_run_are_there_for_prometheus(nightshelf, tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    write_inputs(tmp_path)
    config = write_config(tmp_path, run__metrics_dir="metrics", surface="home/eu")
    summary = nightshelf("run", config, "--output", "json").json
    text = (tmp_path / "metrics" / "nightshelf_home%2Feu.prom").read_text()
    assert text == (Path(summary["run_dir"]) / "metrics.prom").read_text()
    samples = {
        (s.name, s.labels.get("status") or s.labels.get("gate")): s
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert samples["nightshelf_users_recommended", None].value == summary["users_recommended"]
    assert samples["nightshelf_users_recommended", None].labels == {"surface": "home/eu"}
    assert samples["nightshelf_run_status", "published"].value == 1
    assert samples["nightshelf_audit_passed", "duplicates"].value == 1
    assert ("nightshelf_audit_passed", "coverage") not in samples  # it has no limit
    assert samples["nightshelf_audit_value", "coverage"].value == 1
    assert samples["nightshelf_run_info", None].labels["run_id"] == summary["run_id"]
    saved = json.loads((Path(summary["run_dir"]) / "metrics.json").read_text())
    assert saved["rows_published"] == summary["rows_published"]
    refused = nightshelf("run", config, "--set", "audit.min_rows=99", check=6)
    assert refused.code == 6
    text = (tmp_path / "metrics" / "nightshelf_home%2Feu.prom").read_text()
    assert 'nightshelf_run_status{status="refused",surface="home/eu"} 1.0' in text


# --- export ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["long", "wide"])
@pytest.mark.parametrize("form", ["jsonl", "arrow"])
def test_an_export_has_every_user_once_in_the_file_of_its_hash(nightshelf, tmp_path, form, layout):
    from pipelines.inputs.prepare import shard_of

    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    want = pl.read_parquet(tmp_path / PARTITION).sort("user_id", "rank")
    nightshelf("run", config, "--set", f"output.layout={layout}")
    to = tmp_path / "shelves"
    args = ("export", config, "--to", to, "--files", "3", "--format", form, "--output", "json")
    counts = nightshelf(*args, "--set", f"output.layout={layout}").json["files"]
    seen = 0
    for index, (name, count) in enumerate(counts.items()):
        if form == "jsonl":
            part = pl.read_ndjson(to / name) if count else pl.DataFrame()
        else:
            part = pl.from_arrow(pa.ipc.open_stream((to / name).read_bytes()).read_all())
        assert len(part) == count
        assert part["user_id"].is_sorted()
        assert set(shard_of(part["user_id"].to_list(), 3)) == {index}
        assert set(part["surface"]) == {"home"}
        for row in part.iter_rows(named=True):
            mine = want.filter(pl.col("user_id") == row["user_id"])
            assert [i["item_id"] for i in row["items"]] == mine["item_id"].to_list()
            assert [i["score"] for i in row["items"]] == pytest.approx(mine["score"].to_list())
            seen += 1
    assert seen == want["user_id"].n_unique()
    assert (to / "_SUCCESS").exists()
    assert "not empty" in nightshelf(*args, check=2).err


# --- what comes after a publish -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "raised", "code"),
    [
        (TableError("the other catalog is not there"), TableError, 3),
        (AccessError("the other catalog lets nobody in"), AccessError, 2),
        (StorageError("the other catalog does not answer"), RunError, 4),
    ],
    ids=["for good", "no permission", "passing"],
)
def test_a_catalog_that_was_not_told_leaves_a_published_run_published(
    tmp_path, refusal, raised, code
):
    """The rows are there for readers: the manifest says so, and the same command tells again. What
    would fail again ends as what it is; exit 4 is for what a rerun may cure.
    """
    from rich.console import Console

    from jobs.cli.progress import LineProgress
    from jobs.local.launcher import LocalLauncher
    from jobs.running.run import run_job
    from jobs.running.run_folder import load_manifest
    from schemas.config_file import load_config

    class Deaf(LocalLauncher):
        deaf = True

        def published(self, plan, progress):
            if self.deaf:
                raise refusal

    write_inputs(tmp_path)
    config = load_config(str(write_config(tmp_path)))
    launcher, progress = Deaf(), LineProgress(Console(stderr=True))
    with pytest.raises(raised, match="the run is published, but.*the other catalog") as caught:
        run_job(config, launcher, progress)
    assert type(caught.value) is raised
    assert caught.value.exit_code == code
    (run_dir,) = (p.parent for p in tmp_path.glob("runs/*/manifest.json"))
    assert json.loads((run_dir / "manifest.json").read_text())["status"] == "published"
    assert (run_dir / "report.html").exists()
    launcher.deaf = False
    manifest = run_job(config, launcher, progress)
    assert load_manifest(manifest.plan).status == "published"

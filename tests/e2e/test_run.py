"""Whole runs with the fake backend: what is published, what is counted, and doing it twice."""

from __future__ import annotations

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from tests.factories import write_config, write_inputs

PARTITION = "out/ds=2026-11-28/surface=home"


def published(folder):
    return pl.read_parquet(folder / PARTITION).sort("user_id", "rank")


def assert_right(rows: pl.DataFrame, tables) -> None:
    """What every published partition must be."""
    per_user = rows.group_by("user_id", maintain_order=True)
    for _, mine in per_user:
        assert mine["rank"].to_list() == list(range(1, len(mine) + 1))
        assert mine["score"].is_sorted(descending=True)
        assert mine["item_id"].n_unique() == len(mine)
    assert rows["score"].is_finite().all()
    assert rows["item_id"].is_in(tables["catalog"].column("item_id").to_pylist()).all()
    excluded = pl.from_arrow(tables["exclusions"])
    assert rows.join(excluded, on=["user_id", "item_id"], how="semi").is_empty()


@pytest.mark.parametrize("int_ids", [False, True], ids=["string ids", "int64 ids"])
@pytest.mark.parametrize(
    "task",
    [{"score": {}}, {"generate": {"width": 8}}, {"score": {}, "generate": {"width": 8}}],
    ids=["score", "generate", "both"],
)
def test_a_run_publishes_right_rows_and_counts_balance(nightshelf, tmp_path, task, int_ids):
    tables = write_inputs(tmp_path, int_ids=int_ids)
    config = write_config(tmp_path, task={"k": 5, **task})
    summary = nightshelf("run", config, "--output", "json").json
    rows = published(tmp_path)
    assert_right(rows, tables)
    assert rows.schema["user_id"] == (pl.Int64 if int_ids else pl.String)
    assert rows["source"].unique().is_in(list(task)).all()
    assert summary["status"] == "published"
    assert summary["users_in"] == 40
    assert summary["users_in"] == (
        summary["users_recommended"]
        + summary["users_quarantined"]
        + summary["users_without_eligible"]
    )
    assert summary["rows_published"] == len(rows)
    assert summary["users_recommended"] == rows["user_id"].n_unique()
    assert 0 < summary["rows_forwarded"] < summary["rows_naive"]


def test_running_again_scores_nothing_and_publishes_the_same_rows(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    first = nightshelf("run", config, "--output", "json").json
    before = published(tmp_path)
    receipts = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/receipts/*.json")}
    assert len(receipts) == first["shards"] == 4
    second = nightshelf("run", config, "--output", "json")
    assert "4 of 4 shards are done already" in second.err
    assert second.json["run_id"] == first["run_id"]
    assert receipts == {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/*/receipts/*.json")}
    assert_frame_equal(published(tmp_path), before)


def test_a_new_run_over_the_same_date_replaces_its_rows(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    first = nightshelf("run", config, "--output", "json").json
    second = nightshelf("run", config, "--set", "task.k=3", "--output", "json").json
    assert second["run_id"] != first["run_id"]
    rows = published(tmp_path)
    assert rows["run_id"].unique().to_list() == [second["run_id"]]
    assert rows["rank"].max() == 3
    status = nightshelf("status", config, "--output", "json").json
    assert {r["run_id"]: r["status"] for r in status["runs"]} == {
        first["run_id"]: "replaced",
        second["run_id"]: "published",
    }


def test_another_date_or_surface_leaves_the_first_alone(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    before = published(tmp_path)
    nightshelf("run", config, "--ds", "2026-11-29")
    nightshelf("run", config, "--set", "surface=feed home/eu")
    assert_frame_equal(published(tmp_path), before)
    everything = pl.scan_parquet(tmp_path / "out", hive_partitioning=True).collect()
    assert sorted(everything["surface"].unique()) == ["feed home/eu", "home"]
    assert everything["ds"].n_unique() == 2


def test_shards_workers_and_batches_do_not_change_the_rows(
    nightshelf, nightshelf_process, tmp_path
):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    want = published(tmp_path).drop("run_id")
    nightshelf_process("run", config, "--set", "run.shard_users=7", "--set", "run.workers=2")
    assert_frame_equal(published(tmp_path).drop("run_id"), want)
    for settings in (
        ["run.shard_users=1000"],
        ["engine.max_batch_users=1", f"run.work_dir={tmp_path / 'other'}"],
        ["engine.max_batch_tokens=50", "run.shard_users=13"],
    ):
        args = [a for s in settings for a in ("--set", s)]
        nightshelf("run", config, *args)
        assert_frame_equal(published(tmp_path).drop("run_id"), want)


def test_wide_layout_has_one_row_per_user(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    want = published(tmp_path)
    nightshelf("run", config, "--set", "output.layout=wide")
    wide = pl.read_parquet(tmp_path / PARTITION)
    assert wide["user_id"].n_unique() == len(wide)
    long = wide.explode("items").unnest("items").select("user_id", "item_id", "score", "source")
    assert_frame_equal(
        long.sort("user_id", "item_id"),
        want.select("user_id", "item_id", "score", "source").sort("user_id", "item_id"),
    )
    assert_right(
        long.with_columns(
            pl.int_range(1, pl.len() + 1).over("user_id").cast(pl.Int32).alias("rank")
        ),
        tables,
    )
    shown = nightshelf("show", config, "--set", "output.layout=wide", "--user", "u001").out
    assert "Title i" in shown


@pytest.mark.parametrize("shape", ["long", "segment", "shared"])
def test_every_shape_of_candidates_gives_the_scores_of_the_wide_one(nightshelf, tmp_path, shape):
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = write_inputs(tmp_path)
    items = tables["catalog"].column("item_id").to_pylist()[:12]
    users = tables["users"].column("user_id").to_pylist()
    segments = tables["users"].column("segment").to_pylist()
    wide = pa.table({"user_id": users, "item_ids": [items] * len(users)})
    other = {
        "long": pa.table({"user_id": users * 12, "item_id": [i for i in items for _ in users]}),
        "segment": pa.table({"segment": sorted(set(segments)), "item_ids": [items] * 3}),
        "shared": pa.table({"item_id": items}),
    }[shape]
    config = write_config(tmp_path, task={"k": 5, "score": {}})
    pq.write_table(wide, tmp_path / "candidates.parquet")
    nightshelf("run", config)
    want = published(tmp_path).drop("run_id")
    pq.write_table(other, tmp_path / "candidates.parquet")
    summary = nightshelf("run", config, "--output", "json").json
    assert_frame_equal(published(tmp_path).drop("run_id"), want)
    assert summary["candidates_in"] == 12 * len(users)


def test_beams_that_step_in_parts_give_the_same_rows(nightshelf, tmp_path, monkeypatch):
    write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 5, "generate": {"width": 3, "exact": True}})
    nightshelf("run", config)
    want = published(tmp_path)
    assert want["exact"].all()
    monkeypatch.setattr("engine.generate.beam_search._MAX_SLOTS", 50)
    nightshelf("run", config, "--set", f"run.work_dir={tmp_path / 'other'}")
    assert_frame_equal(published(tmp_path).drop("run_id"), want.drop("run_id"))


@pytest.mark.parametrize("int_ids", [False, True], ids=["string ids", "int64 ids"])
def test_any_column_may_be_named_in_the_template(nightshelf, tmp_path, int_ids):
    """Ids, and names that the run's own files use for other things."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    users = write_inputs(tmp_path, int_ids=int_ids)["users"]
    for name in ("file", "duplicate", "candidates", "excluded", "k", "rank"):
        users = users.append_column(name, pa.array([f"{name} of {i}" for i in range(40)]))
    pq.write_table(users, tmp_path / "users.parquet")
    template = "{user_id}{file}{duplicate}{candidates}{excluded}{k}{text:rank}{user_vector}"
    config = write_config(tmp_path, prompt__template=template, task__k_column=None)
    assert nightshelf("run", config, "--output", "json").json["users_recommended"] == 40


def test_each_user_may_have_a_k_of_its_own(nightshelf, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = write_inputs(tmp_path)
    wanted = [None, 1, 2, 5, 6, 0] + [3] * 34
    users = tables["users"].append_column("slots", pa.array(wanted))
    pq.write_table(users, tmp_path / "users.parquet")
    config = write_config(tmp_path)
    nightshelf("run", config)
    full = published(tmp_path)
    summary = nightshelf("run", config, "--set", "task.k_column=slots", "--output", "json").json
    rows = published(tmp_path)
    names = tables["users"].column("user_id").to_pylist()
    lengths = dict(rows.group_by("user_id").len().iter_rows())
    got = [lengths.get(name) for name in names]
    assert got == [5, 1, 2, 5, None, None] + [3] * 34
    assert summary["users_quarantined"] == 2
    assert (
        "rule k_out_of_range: slots must be 1 to 5"
        in nightshelf("show", config, "--set", "task.k_column=slots", "--user", names[4]).out
    )
    joined = rows.join(full, on=["user_id", "rank"], how="left")
    assert (joined["item_id"] == joined["item_id_right"]).all(), "a shorter list is its beginning"


def test_a_second_run_of_the_same_partition_waits_its_turn(nightshelf, tmp_path):
    from filelock import FileLock

    from jobs.running.run_lock import lock_path
    from pipelines.planning.plan import plan_run
    from schemas.config_file import load_config

    write_inputs(tmp_path)
    config = write_config(tmp_path)
    plan = plan_run(load_config(str(config)))
    with FileLock(lock_path(plan)):
        err = nightshelf("run", config, "--set", "task.k=3", check=4).err
        assert "another run of this date and surface is at work" in err
        nightshelf("run", config, "--ds", "2026-11-29")  # another partition is free
    nightshelf("run", config)


def test_dry_run_and_plan_touch_nothing(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    planned = nightshelf("plan", config, "--output", "json").json
    assert planned["shards"] == 4
    assert planned["inputs"]["users"]["rows"] == 40
    assert nightshelf("run", config, "--dry-run", "--output", "json").json == planned
    assert not list((tmp_path / "out").rglob("*.parquet"))
    assert not list((tmp_path / "runs").rglob("*.*"))


def test_show_prints_titles_and_says_why_there_is_nothing(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    shown = nightshelf("show", config, "--user", "u003", "--output", "json").json
    want = published(tmp_path).filter(pl.col("user_id") == "u003")
    assert [i["item_id"] for i in shown["items"]] == want["item_id"].to_list()
    assert all(i["title"] == f"Title {i['item_id']}" for i in shown["items"])
    assert "not in the users table" in nightshelf("show", config, "--user", "nobody", check=3).err


def test_the_command_line_and_lower_layers_load_no_torch():
    import subprocess
    import sys

    code = (
        "import sys, schemas, pipelines.shards.run_shard, pipelines.auditing.audit; "
        "import pipelines.publish, jobs.cli.app; "
        "heavy = {'torch', 'transformers', 'pyspark', 'airflow.sdk'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "task",
    [{"score": {}, "generate": {"width": 8}}, {"label": {"labels": ["y", "n"]}}, {"embed": {}}],
    ids=["score and generate", "label", "embed"],
)
def test_users_that_are_the_same_are_computed_once(nightshelf, tmp_path, task):
    """Equal prompts, vectors, candidates and exclusions."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = write_inputs(tmp_path, num_users=30)
    twins = {"u001": "u000", "u002": "u000", "u020": "u007"}
    for name in ("users", "candidates"):
        rows = {row["user_id"]: row for row in tables[name].to_pylist()}
        for twin, user in twins.items():
            rows[twin] = {**rows[user], "user_id": twin}
        pq.write_table(pa.Table.from_pylist(list(rows.values()), tables[name].schema),
                       tmp_path / f"{name}.parquet")  # fmt: skip
    config = write_config(tmp_path, task={"k": 5, **task}, inputs__exclusions=None)
    config_one = ("run", config, "--set", "run.shard_users=100", "--output", "json")
    summary = nightshelf(*config_one).json
    got = pl.read_parquet(tmp_path / PARTITION, hive_partitioning=False).drop("run_id")
    outcomes = pl.read_parquet(f"{summary['run_dir']}/staged/*-outcomes.parquet")
    done = dict(zip(outcomes["user_id"], outcomes["rows_forwarded"], strict=True))
    assert all(done[user] == 0 and done[twins[user]] > 0 for user in twins)
    reused = outcomes.filter(pl.col("user_id") == "u001")
    assert reused["reused_tokens"].item() == reused["prompt_tokens"].item()
    for twin, user in twins.items():
        mine, theirs = (got.filter(pl.col("user_id") == u).drop("user_id") for u in (twin, user))
        assert_frame_equal(mine, theirs)
    assert got["user_id"].n_unique() == 30


def test_the_summary_says_what_a_run_cost(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    free = nightshelf("run", config, "--output", "json").json
    assert free["cost"] is free["cost_per_million_users"] is None
    priced = ("run", config, "--set", "run.price_per_hour=7200", "--output", "json")
    paid = nightshelf(*priced).json
    assert paid["run_id"] == free["run_id"], "a price does not change what is recommended"
    assert paid["device_hours"] == free["device_hours"] > 0
    assert paid["cost"] == pytest.approx(7200 * paid["device_hours"], abs=0.01)
    assert paid["cost_per_million_users"] == pytest.approx(paid["cost"] * 1e6 / 40, rel=0.01)
    words = " ".join(nightshelf(*priced[:-2]).out.replace("│", " ").split())
    assert "per million users" in words  # the cell may break anywhere


@pytest.mark.parametrize(
    "task",
    [{"score": {}, "generate": {"width": 8}}, {"label": {"labels": ["y", "n"]}}, {"embed": {}}],
    ids=["score and generate", "label", "embed"],
)
def test_a_pack_that_does_not_fit_is_cut_until_it_does(nightshelf, tmp_path, task):
    write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 5, **task})
    nightshelf("run", config)
    want = pl.read_parquet(tmp_path / PARTITION).drop("run_id")
    small = ("--set", "engine.backend=tests.trouble:small_backend", "--output", "json")
    summary = nightshelf("run", config, *small).json
    assert summary["users_quarantined"] == 0
    assert_frame_equal(pl.read_parquet(tmp_path / PARTITION).drop("run_id"), want)


def test_one_user_that_never_fits_fails_its_shard_and_nothing_else(nightshelf, tmp_path):
    import pyarrow.parquet as pq

    tables = write_inputs(tmp_path)
    names = [f"s{u % 3}" if u != 5 else "x" * 300 for u in range(40)]
    users = tables["users"].drop_columns(["segment"]).append_column("segment", [names])
    pq.write_table(users, tmp_path / "users.parquet")
    config = write_config(tmp_path, prompt__template="{segment}{history}")
    small = ("--set", "engine.backend=tests.trouble:small_backend", "--output", "json")
    done = nightshelf("run", config, *small, check=4)
    assert "1 of 4 shards failed" in done.err
    assert "out of memory" in done.err

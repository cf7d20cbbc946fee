"""The launcher on a Spark session of this process: the same run as the local launcher's."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cases.helpers import torch_config
from tests.factories import write_config, write_inputs
from tests.spark.backends import late_folder
from tests.spark.helpers import attempts, clear, published_bytes, receipts


@pytest.mark.parametrize("backend", ["fake", "torch"])
def test_the_rows_are_those_of_the_local_launcher(
    nightshelf, spark, tmp_path, model_folder, backend
):
    write_inputs(tmp_path, num_users=60)
    config = (
        write_config(tmp_path, run__shard_users=6)
        if backend == "fake"
        else torch_config(tmp_path, model_folder, run__shard_users=15, run__workers=0)
    )
    want = nightshelf("run", config, "--output", "json").json
    files = published_bytes(tmp_path)
    clear(tmp_path)
    got = nightshelf("run", config, "--launcher", "spark", "--output", "json")
    assert got.json["run_id"] == want["run_id"], "how a run is launched is no part of its id"
    assert published_bytes(tmp_path) == files
    assert len(attempts(tmp_path)) == want["shards"], "one task, one attempt for each shard"
    again = nightshelf("run", config, "--launcher", "spark", "--output", "json")
    assert again.json["rows_published"] == want["rows_published"]
    assert len(attempts(tmp_path)) == want["shards"], "a shard with a receipt is not run again"


def test_a_worker_keeps_its_engine_for_all_its_shards(nightshelf, spark, tmp_path):
    write_inputs(tmp_path, num_users=60)
    nightshelf("run", write_config(tmp_path, run__shard_users=6, run__launcher="spark"))
    engines = {(a["pid"], a["engine"]) for a in attempts(tmp_path)}
    assert len(attempts(tmp_path)) == 10
    assert len(engines) == len({pid for pid, _ in engines}) <= 2


def test_another_run_in_the_same_workers_gets_another_engine(nightshelf, spark, tmp_path):
    """A Python worker outlives a run; its engine must not."""
    write_inputs(tmp_path, num_users=20)
    rows = {}
    for seed in (0, 1, 0):
        config = write_config(
            tmp_path, engine={"backend": "fake", "seed": seed}, run__launcher="spark"
        )
        clear(tmp_path)
        nightshelf("run", config)
        rows.setdefault(seed, []).append(
            [pq.read_table(pa.BufferReader(b))["score"] for b in published_bytes(tmp_path).values()]
        )
    assert rows[0][0] == rows[0][1]
    assert rows[0][0] != rows[1][0]


def mark_one_user(tmp_path, **changes):
    tables = write_inputs(tmp_path, num_users=30)
    names = tables["users"].column("user_id").to_pylist()
    moods = pa.array(["!" if name == "u005" else "ok" for name in names])
    pq.write_table(tables["users"].append_column("mood", moods), tmp_path / "users.parquet")
    return write_config(
        tmp_path,
        prompt__template="{text:mood}{history}{user_vector}",
        run__max_attempts=2,
        run__shard_users=6,
        **changes,
    )


@pytest.mark.parametrize(
    ("backend", "message"),
    [("killing_backend", "ended without a word"), ("raising_backend", "cannot bear")],
)
def test_a_poison_shard_fails_alone_and_is_the_only_one_repaired(
    nightshelf, spark, tmp_path, monkeypatch, backend, message
):
    """C3, ray #59522: a dead engine was asked again and again. A shard that kills its worker, or
    breaks its engine, is given up after `run.max_attempts`; the others are done."""
    config = mark_one_user(
        tmp_path, engine__backend=f"tests.spark.backends:{backend}", run__launcher="spark"
    )
    failed = nightshelf("run", config, "--output", "json", check=4)
    assert "1 of 5 shards failed" in failed.err
    assert message in failed.err
    assert "given up after 2 attempts" in failed.err
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").rglob("*.parquet"))
    done = receipts(tmp_path)
    assert len(done) == 4
    tried = [a for a in attempts(tmp_path) if f"shard-{a['shard']:05d}.json" not in done]
    assert len(tried) == 2
    assert len({a["engine"] for a in tried}) == 2, "each attempt had an engine of its own"
    monkeypatch.setenv("NIGHTSHELF_TEST_CURED", "1")  # workers of Spark do not see it
    nightshelf("run", config, "--launcher", "local")
    after = receipts(tmp_path)
    assert {name: after[name] for name in done} == done


def test_an_engine_that_starts_nowhere_ends_with_5(nightshelf, spark, tmp_path):
    write_inputs(tmp_path)
    config = write_config(
        tmp_path, engine__backend="tests.trouble:no_memory_backend", run__launcher="spark"
    )
    done = nightshelf("run", config, "--output", "json", check=5)
    assert "CUDA out of memory" in done.err
    assert done.json["error"]["kind"] == "engine"


def test_a_bad_host_does_not_drain_the_queue_while_a_good_one_loads(nightshelf, spark, tmp_path):
    """Shards that met no engine are done by the one that was late. Both failed engines may have had
    the same shard, as Spark likes: only that one may be given up."""
    write_inputs(tmp_path, num_users=30)
    seed = time.time_ns() % 2**31
    config = write_config(
        tmp_path,
        engine={"backend": "tests.spark.backends:late_backend", "seed": seed},
        run__launcher="spark",
        run__max_attempts=2,
        run__shard_users=6,
    )
    try:
        done = nightshelf("run", config, check=None)
    finally:
        shutil.rmtree(late_folder(seed), ignore_errors=True)
    failures = Counter(a["shard"] for a in attempts(tmp_path) if a["failure"] is not None)
    given_up = [shard for shard, times in failures.items() if times == 2]
    assert sum(failures.values()) == 2
    assert len(receipts(tmp_path)) == 5 - len(given_up)
    assert done.code == (4 if given_up else 0)
    assert "shards met no engine that starts; others have started since" in done.err


def test_an_engine_that_hangs_while_it_starts_everywhere_ends_with_5(nightshelf, spark, tmp_path):
    write_inputs(tmp_path)
    config = write_config(
        tmp_path,
        engine__backend="tests.spark.backends:never_started_backend",
        run__launcher="spark",
        run__max_attempts=2,
        run__start_timeout_s=10,
    )
    done = nightshelf("run", config, "--output", "json", check=5)
    assert "the engine has not started for 10 s" in done.err
    assert done.json["error"]["kind"] == "engine"


def test_a_worker_that_says_nothing_is_ended_by_its_deadline(nightshelf, spark, tmp_path):
    """C4, ray #59986: a wedged engine hung the job."""
    write_inputs(tmp_path, num_users=10)
    config = write_config(
        tmp_path,
        engine__backend="tests.spark.backends:wedged_once_backend",
        run__launcher="spark",
        run__shard_timeout_s=4,
    )
    done = nightshelf("run", config)
    assert "reported nothing for 4 s" in done.err
    assert [a["shard"] for a in attempts(tmp_path)] == [0, 0]


def test_the_manifest_names_spark(nightshelf, spark, tmp_path):
    write_inputs(tmp_path, num_users=10)
    nightshelf("run", write_config(tmp_path, run__launcher="spark"))
    (manifest,) = tmp_path.glob("runs/*/manifest.json")
    assert "pyspark" in json.loads(manifest.read_text())["versions"]


def test_the_benchmark_times_both_launchers(spark, tmp_path, capsys):
    from benchmarks.spark import costs
    from jobs.local.launcher import LocalLauncher
    from jobs.running.run_folder import plan_path
    from jobs.spark.launch import SparkLauncher
    from jobs.spark.session import SparkApp
    from pipelines.inputs.prepare import prepare_run
    from pipelines.planning.plan import plan_run
    from pipelines.storage import files
    from schemas.config_file import load_config

    write_inputs(tmp_path, num_users=40)
    plan = plan_run(load_config(write_config(tmp_path, run__shard_users=5)))
    files.write_json(plan_path(plan.run_dir), plan.model_dump(mode="json"))
    with SparkApp() as app:
        launchers = {"local": LocalLauncher(), "spark": SparkLauncher(app)}
        found = costs(launchers, plan, prepare_run(plan), 5, repeats=1, workers=2)
    assert [one.launcher for one in found] == ["local", "spark"]
    for one in found:
        assert one.shards == 8
        assert 0 < one.shard_s < one.stage_s

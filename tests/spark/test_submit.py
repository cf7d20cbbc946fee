"""spark-submit as users start it: rows, exit codes, addresses, and processes that are killed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import textwrap
import zipfile

import psutil
import pytest

from tests.cases.helpers import torch_config, write
from tests.e2e.test_s3 import rows_of, server, store  # noqa: F401
from tests.factories import hostile_packages, write_config, write_inputs
from tests.spark.helpers import ROOT, attempts, clear, published_bytes, receipts, wait_for

SLOW = "tests.spark.backends:slow_backend"


def session_of(process) -> list[psutil.Process]:
    """Every process that a spark-submit started."""
    found = []
    for one in psutil.process_iter(["pid"]):
        try:
            if os.getsid(one.pid) == process.pid:
                found.append(one)
        except OSError:
            continue
    return found


def executors_of(process) -> list[psutil.Process]:
    found = []
    for one in session_of(process):
        try:
            if any("CoarseGrainedExecutorBackend" in word for word in one.cmdline()):
                found.append(one)
        except psutil.Error:
            continue
    return [one for one in found if one.name() == "java"]


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """Settings of a local cluster in which each of two executors owns one GPU: a made-up address.

    The two workers run the script at once; whoever makes the folder gets the first GPU.
    """
    script = tmp_path / "discover.sh"
    script.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        if mkdir {tmp_path}/taken 2> /dev/null; then at=0; else at=1; fi
        echo '{{"name":"gpu","addresses":["'$at'"]}}'
        """)
    )
    script.chmod(0o755)
    return {
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "1",
        "spark.executor.memory": "512m",
    }


def test_an_executor_is_killed_and_the_run_ends_as_if_not(nightshelf, submit, cluster, tmp_path):
    """Two executors with a GPU each, which only the scoring stage asks for; one executor is lost in
    the middle of the run, with its worker.
    """
    write_inputs(tmp_path, num_users=64)
    config = write_config(tmp_path, engine__backend=SLOW, run__shard_users=4, spark__profile="task")
    nightshelf("run", config)
    want = published_bytes(tmp_path)
    clear(tmp_path)

    process = submit.start(
        "run", config, "--output", "json", master="local-cluster[2,1,1024]", conf=cluster
    )
    wait_for(lambda: len({a["pid"] for a in attempts(tmp_path)}) == 2, "two workers", process)
    wait_for(lambda: len(receipts(tmp_path)) >= 2, "two shards", process)
    (seen,) = nightshelf("status", config, "--output", "json").json["runs"]
    assert seen["status"] == "scoring"
    assert 2 <= seen["shards_done"] < 16
    victim = executors_of(process)[0]
    workers = victim.children(recursive=True)
    held = {a["engine"] for a in attempts(tmp_path) if a["pid"] in {w.pid for w in workers}}
    victim.send_signal(signal.SIGKILL)
    done = submit.wait(process)

    assert done.json["status"] == "published"
    assert published_bytes(tmp_path) == want
    assert not any(worker.is_running() for worker in workers), "an engine outlived its executor"
    tried = attempts(tmp_path)
    for engine in {a["engine"] for a in tried}:
        mine = [a for a in tried if a["engine"] == engine]
        assert len({a["pid"] for a in mine}) == 1
        assert len({tuple(a["devices"]) for a in mine}) == 1, "an engine changed its address"
    devices = {a["engine"]: tuple(a["devices"]) for a in tried}
    assert set(devices.values()) == {("0",), ("1",)}
    alone = [device for engine, device in devices.items() if engine not in held]
    lost = [device for engine, device in devices.items() if engine in held]
    assert len(lost) == 1
    assert len(alone) == len(set(alone)), "two engines on one address"


def test_executors_without_a_gpu_prepare_and_executors_with_one_score(
    nightshelf, submit, cluster, tmp_path
):
    """`spark.profile: executor` under dynamic allocation: the scoring stage has executors of its
    own, each with a GPU that the application's other executors never had.
    """
    write_inputs(tmp_path, num_users=24)
    config = write_config(tmp_path, run__shard_users=4)
    nightshelf("run", config)
    want = published_bytes(tmp_path)
    clear(tmp_path)

    conf = {name: value for name, value in cluster.items() if "executor.resource" not in name}
    conf |= {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.maxExecutors": "2",  # of each kind
        "spark.executor.cores": "1",
    }
    own = {"spark__profile": "executor", "spark__prepare": "executors"}
    script = conf["spark.worker.resource.gpu.discoveryScript"]
    config = write_config(tmp_path, run__shard_users=4, **own, spark__discovery_script=script)
    process = submit.start(
        "run", config, "--output", "json", master="local-cluster[2,2,2048]", conf=conf
    )
    done = submit.wait(process)
    assert done.json["status"] == "published"
    assert published_bytes(tmp_path) == want
    devices = {(a["engine"], tuple(a["devices"])) for a in attempts(tmp_path)}
    assert {address for _, address in devices} <= {("0",), ("1",)}
    assert len(devices) == len({address for _, address in devices}), "two engines on one address"


def test_a_killed_driver_leaves_nobody_and_the_run_resumes(nightshelf, submit, tmp_path):
    write_inputs(tmp_path, num_users=60)
    config = write_config(tmp_path, engine__backend=SLOW, run__shard_users=5)
    process = submit.start("run", config)
    wait_for(lambda: len(receipts(tmp_path)) >= 3, "three shards", process)
    everybody = session_of(process)
    assert len(everybody) >= 4, "the JVM, the driver, Spark's daemon, its workers"
    process.send_signal(signal.SIGKILL)
    gone, left = psutil.wait_procs(everybody, timeout=60)
    assert not left
    done = receipts(tmp_path)
    assert 3 <= len(done) < 12
    assert not list(tmp_path.glob("out/**/*.parquet"))
    resumed = nightshelf("run", config, "--launcher", "local")
    assert "of 12 shards are done already" in resumed.err
    after = receipts(tmp_path)
    assert {name: after[name] for name in done} == done, "a finished shard was scored again"
    assert (tmp_path / "out/ds=2026-11-28/surface=home/_SUCCESS").exists()


def test_a_refused_audit_ends_spark_submit_with_6(submit, tmp_path):
    """C25, airflow #49717: a failed job was shown as a success."""
    tables = write_inputs(tmp_path)
    write(tmp_path, "candidates", tables["candidates"].slice(0, 10))
    config = write_config(tmp_path, task={"k": 5, "score": {}}, audit={"min_coverage": 0.9})
    done = submit("run", config, "--output", "json", check=6)
    assert done.json["error"]["exit_code"] == 6
    assert "coverage is 0.25, allowed >= 0.9" in done.text


def test_a_wrong_setting_ends_it_with_2(submit, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    done = submit("run", config, "--set", "run.shard_userz=3", check=2)
    assert "run.shard_userz: unknown key; did you mean 'shard_users'?" in done.text


OTHER_VERSION = """\
import sys


class Version(tuple):
    major, minor, micro, releaselevel, serial = 3, 99, 0, "final", 0


sys.version_info = Version((3, 99, 0, "final", 0))
"""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no packages", "No module named 'pyarrow'"),
        ("other version", "Python in worker has different version: 3.99 than that in driver"),
    ],
)
def test_a_python_that_cannot_run_the_driver_s_code_is_named(submit, tmp_path, what, message):
    """A package missing on executors; another Python than the driver's: exit code 5, and why."""
    python = tmp_path / "python-of-executors"
    flag = "-S" if what == "no packages" else ""  # without site-packages
    env = f"PYTHONPATH={tmp_path}/site:$PYTHONPATH " if what == "other version" else ""
    python.write_text(f'#!/bin/sh\n{env}exec {os.path.realpath(sys.executable)} {flag} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(OTHER_VERSION)
    write_inputs(tmp_path, num_users=10)
    config = write_config(tmp_path)
    done = submit("run", config, "--output", "json", check=5, env={"PYSPARK_PYTHON": str(python)})
    said = done.json["error"]["message"]
    assert "executors cannot run the driver's Python" in said
    assert message in said
    assert "spark.pyspark.python" in said
    assert len(list(tmp_path.glob("runs/*/shards/*.parquet"))) == 1, "prepared, so it resumes"


def test_a_cluster_that_gives_nothing_is_named(submit, tmp_path):
    """Executors larger than any machine: Spark itself would wait for ever."""
    write_inputs(tmp_path, num_users=10)
    config = write_config(tmp_path, run__start_timeout_s=3)
    large = {"spark.executor.memory": "512m", "spark.executor.cores": "2"}
    done = submit("run", config, "--output", "json", check=5, master="local-cluster[1,1,512]",
                  conf=large)  # fmt: skip
    assert "no executor has answered for 3 s" in done.json["error"]["message"]


def test_a_backfill_runs_its_days_in_one_driver_with_torch(
    nightshelf, submit, tmp_path, model_folder
):
    write_inputs(tmp_path)
    config = torch_config(tmp_path, model_folder, run__shard_users=20, run__workers=0)
    nightshelf("run", config)
    want = published_bytes(tmp_path)
    clear(tmp_path)
    days = ("--from", "2026-11-27", "--to", "2026-11-28")
    done = submit("backfill", config, *days, "--output", "json")
    assert [(d["ds"], d["state"]) for d in done.json["days"]] == [
        ("2026-11-27", "published"),
        ("2026-11-28", "published"),
    ]
    assert published_bytes(tmp_path) == want
    assert len(attempts(tmp_path)) == 4, "Spark's workers ran them"


def test_executors_work_in_an_object_store(nightshelf, submit, store, tmp_path):  # noqa: F811
    """Inputs, work folder and table are in a store; executors prepare and score there."""
    fs, bucket = store
    names = ("users", "catalog", "candidates", "exclusions")
    inputs = {name: f"s3://{bucket}/in/{name}.parquet" for name in names}
    changes = {"output__path": f"s3://{bucket}/out", "run__shard_users": 20}
    config = write_config(tmp_path, inputs=inputs, spark__prepare="executors", **changes)
    nightshelf("run", config)
    want = rows_of(store)
    remote = ("--set", f"run.work_dir=s3://{bucket}/runs", "--output", "json")
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    done = submit("run", config, *remote, env=environment)
    assert done.json["run_dir"].startswith(f"s3://{bucket}/runs/")
    fs.invalidate_cache()
    assert rows_of(store).equals(want)
    assert len(fs.glob(f"{bucket}/runs/*/attempts/*/shard-*/*.json")) == 3


@pytest.mark.parametrize("prepare", ["driver", "executors"])
def test_packages_of_the_same_names_are_in_nobody_s_way(submit, tmp_path, prepare):
    """On the path of driver and executors, and in a zip of --py-files that stands before ours."""
    hostile = hostile_packages(tmp_path / "theirs")
    theirs = shutil.make_archive(str(tmp_path / "theirs"), "zip", hostile)
    with zipfile.ZipFile(tmp_path / "ours.zip", "w") as ours:
        for name in ("nightshelf", "schemas", "engine", "pipelines", "jobs"):
            for file in (ROOT / name).rglob("*.py"):
                ours.write(file, file.relative_to(ROOT))
    write_inputs(tmp_path)
    config = write_config(tmp_path, run__shard_users=20, spark__prepare=prepare)
    conf = {"spark.submit.pyFiles": f"{tmp_path}/ours.zip,{theirs}"}
    done = submit("run", config, "--output", "json", conf=conf, env={"PYTHONPATH": str(hostile)})
    assert done.json["status"] == "published"
    assert len(attempts(tmp_path)) == done.json["shards"], "Spark's workers ran them"


@pytest.mark.parametrize("whom", ["spark-submit", "the driver", "the group"])
def test_a_sigterm_drains_the_driver_and_the_run_resumes(nightshelf, submit, tmp_path, whom):
    """In client mode: a spot machine that goes, a scheduler's deadline."""
    write_inputs(tmp_path, num_users=64)
    config = write_config(tmp_path, engine__backend=SLOW, run__shard_users=4)
    nightshelf("run", config, "--set", "engine.backend=fake")
    clear(tmp_path)
    process = submit.start("run", config, "--output", "json")
    wait_for(lambda: len(receipts(tmp_path)) >= 2, "two shards", process)
    if whom == "the group":
        os.killpg(process.pid, signal.SIGTERM)
    elif whom == "spark-submit":
        process.send_signal(signal.SIGTERM)
    else:
        (driver,) = (p for p in session_of(process) if _is_driver(p))
        driver.send_signal(signal.SIGTERM)
    done = submit.wait(process, check=143)
    wait_for_end(process)
    assert "Traceback" not in done.err
    kept = receipts(tmp_path)
    assert 2 <= len(kept) <= 16  # all of them where the machine was faster than the signal
    assert len(kept) == 16 or not list(tmp_path.glob("out/**/*.parquet"))
    nightshelf("run", config, "--launcher", "local", "--set", "run.workers=0")
    after = receipts(tmp_path)
    assert {name: after[name] for name in kept} == kept
    assert published_bytes(tmp_path)


def _is_driver(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
        return any(w.endswith("spark_submit.py") for w in words) and "python" in process.name()
    except psutil.Error:  # it has just ended
        return False


def wait_for_end(process) -> None:
    """Nobody of a spark-submit is left."""
    _, left = psutil.wait_procs(session_of(process), timeout=60)
    assert not left, left

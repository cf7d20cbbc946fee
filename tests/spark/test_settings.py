"""What Spark's settings must say, and what executors must be like: no Spark is started here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.spark.conf import check_conf
from jobs.spark.probe import check_answers, look_around, questions
from jobs.spark.session import first_words, with_retries
from jobs.spark_submit import with_launcher
from pipelines.planning.plan import plan_run
from schemas.config_file import load_config
from schemas.errors import ConfigError, EngineError
from tests.factories import write_config, write_inputs
from tests.spark.helpers import ROOT

CLUSTER = {"spark.master": "yarn"}
ONE_GPU = {
    **CLUSTER,
    "spark.executor.resource.gpu.amount": "1",
    "spark.task.resource.gpu.amount": "1",
}
EXECUTOR_PROFILE = {"spark__profile": "executor", "spark__discovery_script": "/opt/gpus.sh"}


def check(folder: Path, conf: dict[str, str], **changes) -> None:
    check_conf(load_config(write_config(folder, **changes)), conf.get)


@pytest.mark.parametrize(
    ("conf", "changes"),
    [
        (CLUSTER, {}),
        ({"spark.master": "local[4]"}, {}),
        (ONE_GPU, {"engine__device": "cuda"}),
        ({**ONE_GPU, "spark.task.resource.gpu.amount": "1.0"}, {}),
        ({k: v for k, v in ONE_GPU.items() if "task" not in k}, {"spark__profile": "task"}),
        ({**CLUSTER, "spark.dynamicAllocation.enabled": "true"}, EXECUTOR_PROFILE),
        (
            {"spark.master": "yarn", "spark.executor.resource.accel.amount": "1",
             "spark.task.resource.accel.amount": "1"},
            {"spark__resource": "accel"},
        ),
    ],
)  # fmt: skip
def test_settings_that_give_every_engine_its_gpus(tmp_path, conf, changes):
    check(tmp_path, conf, **changes)


@pytest.mark.parametrize(
    ("conf", "changes", "message"),
    [
        (CLUSTER, {"engine__device": "cuda"}, "no GPU resource is configured"),
        ({**CLUSTER, "spark.task.resource.gpu.amount": "1"}, {}, "no GPU resource is configured"),
        (CLUSTER, {"spark__profile": "task"}, "no GPU resource is configured"),
        ({**ONE_GPU, "spark.task.resource.gpu.amount": "0.5"}, {}, "more task slots than GPUs"),
        (
            {k: v for k, v in ONE_GPU.items() if "task" not in k},
            {},
            "more task slots than GPUs",
        ),
        ({**ONE_GPU, "spark.task.resource.gpu.amount": "2"}, {}, "more GPUs than it uses"),
        ({**ONE_GPU, "spark.executor.resource.gpu.amount": "4"}, {}, "GPUs of several engines"),
        ({**ONE_GPU, "spark.speculation": "true"}, {}, "spark.speculation is on"),
        ({**ONE_GPU, "spark.python.worker.reuse": "false"}, {}, "load the model again"),
        ({**ONE_GPU, "spark.master": "local[2]"}, {}, "waits forever"),
        ({"spark.master": "local[2]"}, {"spark__profile": "task"}, "needs executors"),
        ({"spark.master": "local"}, {"engine__device": "cuda"}, "hands out no GPUs"),
        (CLUSTER, EXECUTOR_PROFILE, "needs dynamic allocation"),
        (
            {**ONE_GPU, "spark.dynamicAllocation.enabled": "true"},
            EXECUTOR_PROFILE,
            "asks for GPUs by itself",
        ),
    ],
)
def test_settings_that_would_not_are_named(tmp_path, conf, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check(tmp_path, conf, **changes)
    assert caught.value.expected or caught.value.do


def test_an_engine_has_one_gpu(tmp_path):
    write_inputs(tmp_path)
    with pytest.raises(ConfigError, match=r"one engine per GPU"):
        plan_run(load_config(write_config(tmp_path, engine__tensor_parallel=2)))


def test_a_discovery_script_belongs_to_a_profile(tmp_path):
    with pytest.raises(ConfigError, match=r"profile: executor"):
        load_config(write_config(tmp_path, spark__discovery_script="/opt/gpus.sh"))


@pytest.fixture
def plan(tmp_path):
    write_inputs(tmp_path)
    plan = plan_run(load_config(write_config(tmp_path)))
    Path(plan.run_dir).mkdir(parents=True)
    (Path(plan.run_dir) / "plan.json").write_text("{}")
    return plan


def answer(plan, **changes) -> str:
    said = json.loads(look_around(json.dumps(questions(plan))))
    for name, value in changes.items():
        said[name] = {**said[name], **value} if isinstance(value, dict) else value
    return json.dumps(said)


def test_an_executor_like_the_driver_is_fine(plan):
    assert check_answers(plan, [answer(plan), answer(plan)]) == []


def test_another_torch_is_told_and_lets_run(plan):
    (note,) = check_answers(plan, [answer(plan, versions={"torch": "2.1.0"})] * 2)
    assert "torch 2.1.0" in note


def test_missing_packages_are_named(plan):
    with pytest.raises(EngineError, match=r"missing on an executor.*polars, xxhash"):
        check_answers(plan, [answer(plan), answer(plan, missing=["polars", "xxhash"])])


def test_another_nightshelf_is_refused(plan):
    with pytest.raises(EngineError, match="another nightshelf"):
        check_answers(plan, [answer(plan, versions={"nightshelf": "9.9"})])


def test_a_folder_that_executors_do_not_see_is_named(plan):
    (Path(plan.run_dir) / "plan.json").unlink()
    with pytest.raises(ConfigError, match="cannot read the run's folder.*No such file or dir"):
        check_answers(plan, [answer(plan)])


def test_a_folder_that_executors_cannot_write_is_named(plan):
    (Path(plan.run_dir) / "attempts").write_text("a file where a folder must be")
    with pytest.raises(ConfigError, match="cannot write into the run's folder"):
        check_answers(plan, [answer(plan)])


def test_gpus_that_spark_does_not_hand_out_are_named(plan):
    assert check_answers(plan, [answer(plan, gpus=4)]) == []
    with pytest.raises(ConfigError, match=r"GPUs that Spark does not hand out.*4 GPUs"):
        check_answers(plan, [answer(plan, gpus=4)], handed_out=False)


def test_a_model_that_is_not_everywhere_is_named(plan):
    engine = plan.config.engine.model_copy(update={"model": str(Path(plan.run_dir))})
    config = plan.config.model_copy(update={"engine": engine})
    plan = plan.model_copy(update={"config": config})
    with pytest.raises(EngineError, match=r"engine.model is not the same.*nothing there"):
        check_answers(plan, [answer(plan, listed={"engine.model": []})])


def test_the_command_line_loads_no_spark():
    code = "import sys, jobs.cli.app; sys.exit(bool({'pyspark', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_spark_connect_is_refused(nightshelf, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_REMOTE", "sc://somewhere:15002")
    write_inputs(tmp_path)
    done = nightshelf("run", write_config(tmp_path, run__launcher="spark"), check=2)
    assert "Spark Connect is not supported" in done.err


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["run", "c.yaml"], ["run", "--launcher", "spark", "c.yaml"]),
        (["backfill", "c", "--from", "x"], ["backfill", "--launcher", "spark", "c", "--from", "x"]),
        (["run", "c.yaml", "--launcher", "local"], ["run", "c.yaml", "--launcher", "local"]),
        (["run", "c.yaml", "--launcher=local"], ["run", "c.yaml", "--launcher=local"]),
        (["status", "c.yaml"], ["status", "c.yaml"]),
        ([], []),
    ],
)
def test_spark_submit_chooses_spark(arguments, wanted):
    assert with_launcher(arguments) == wanted


@pytest.mark.parametrize(
    ("master", "with_four"),
    [("local", "local[1,4]"), ("local[2]", "local[2,4]"), ("local[*]", "local[*,4]"),
     ("local[2,1]", "local[2,1]")],
)  # fmt: skip
def test_a_local_master_tries_again(master, with_four):
    assert with_retries(master, 4) == with_four


def test_of_a_spark_error_the_reason_is_kept():
    text = (
        "\n  An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
        '  File "x.py", line 3, in f\n    import pyarrow\nModuleNotFoundError: No module named '
        "'pyarrow'\n SQLSTATE: 38000\n\tat org.apache.spark.X(Y.scala:1)"
    )
    assert first_words(RuntimeError(text)) == "ModuleNotFoundError: No module named 'pyarrow'"
    assert first_words(RuntimeError("one\n\tat java")) == "one"
    java = "An error occurred while calling None.x.\n: x.Bad: too much memory\n\tat x.Y(Z:1)"
    assert first_words(RuntimeError(java)) == "x.Bad: too much memory"
    assert first_words(RuntimeError("")) == "RuntimeError"


SMI = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa-1)
  MIG 1g.5gb      Device  0: (UUID: MIG-m0)
  MIG 1g.5gb      Device  1: (UUID: MIG-m1)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb-2)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-cccc-3)
"""


@pytest.mark.parametrize(
    ("visible", "addresses"),
    [
        (None, ["MIG-m0", "MIG-m1", "GPU-bbbb-2", "GPU-cccc-3"]),
        ("1,2", ["GPU-bbbb-2", "GPU-cccc-3"]),
        ("0", ["MIG-m0", "MIG-m1"]),
        ("GPU-cccc,MIG-m1", ["MIG-m1", "GPU-cccc-3"]),
        ("1,-1,2", ["GPU-bbbb-2"]),
        ("", []),
    ],
)
def test_the_discovery_script_prints_the_gpus(tmp_path, visible, addresses):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{SMI}END\n")
    fake.chmod(0o755)
    assert discovered(f"{tmp_path}:/usr/bin:/bin", visible) == addresses


def test_the_discovery_script_without_a_gpu(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert discovered("/usr/bin:/bin", None) == []
    (tmp_path / "nvidia-smi").chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError):  # a driver that is broken is not no GPU
        discovered(f"{tmp_path}:/usr/bin:/bin", None)


def discovered(path: str, visible: str | None) -> list[str]:
    env = {"PATH": path} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    script = ROOT / "examples/spark/gpu_discovery.sh"
    done = subprocess.run([script], env=env, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["name"] == "gpu"
    return found["addresses"]


def test_the_presets_pass_the_check(tmp_path):
    """examples/spark/*.conf: every preset would be accepted, with device cuda where it has GPUs."""
    presets = sorted((ROOT / "examples/spark").glob("*.conf"))
    assert len(presets) >= 4
    for preset in presets:
        lines = [line for line in preset.read_text().splitlines() if line.strip()]
        pairs = [line.split(None, 1) for line in lines if not line.startswith("#")]
        conf = {name: value.strip() for name, value in pairs}
        conf.setdefault("spark.master", "yarn")
        gpus = "spark.executor.resource.gpu.amount" in conf
        profile = {} if not gpus else {"engine__device": "cuda"}
        if conf.get("spark.dynamicAllocation.enabled") == "true" and not gpus:
            profile = EXECUTOR_PROFILE
        check(tmp_path, conf, **profile)

"""Whole runs with `engine.backend: trtllm`, over the strict double of TensorRT-LLM in worker
processes; and what happens where there is no TensorRT-LLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml

from schemas.config_file import load_config
from tests import trtllm
from tests.cases.helpers import published, staged, write_projector
from tests.factories import write_config, write_inputs

ROOT = Path(__file__).parents[2]
BOTH = {"k": 5, "score": {}, "generate": {"width": 8}}


def run(config, *args, check, double=True, **env):
    """`nightshelf run` in a process of its own, which finds the double by PYTHONPATH."""
    if trtllm.installed():
        pytest.skip("TensorRT-LLM itself is installed")
    paths = [str(ROOT), *([str(trtllm.DOUBLE)] if double else [])]
    done = subprocess.run(
        [sys.executable, "-m", "jobs", "run", str(config), *args, "--output", "json"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | env,
    )
    assert done.returncode == check, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def configure(folder, model, backend="trtllm", task=None, workers=0, **engine):
    projector = str(folder / "projector")
    settings = {"backend": backend, "model": model, "device": "cpu", "projector": projector}
    return write_config(
        folder,
        engine=settings | engine,
        prompt={"template": "{user_vector} {history}", "max_tokens": 60},
        task=task or BOTH,
        run={"shard_users": 20, "workers": workers},
    )


@pytest.fixture
def inputs(tmp_path):
    write_inputs(tmp_path)
    write_projector(tmp_path / "projector")
    return tmp_path


def assert_same_lists(one: pl.DataFrame, other: pl.DataFrame, nats: float = 1e-4) -> None:
    """The same scores by rank, and the same items but where scores are nearer than that."""
    assert one.select("user_id", "rank").equals(other.select("user_id", "rank"))
    assert (one["score"] - other["score"]).abs().max() <= nats
    mine, theirs = (
        dict(zip(zip(d["user_id"], d["item_id"], strict=True), d["score"], strict=True))
        for d in (one, other)
    )
    last = dict(one.group_by("user_id").agg(pl.col("score").min()).iter_rows())
    for user, item in set(mine) ^ set(theirs):  # only at the end of a list, between equals
        score = mine.get((user, item), theirs.get((user, item)))
        assert score == pytest.approx(last[user], abs=nats)


def test_worker_processes_publish_what_the_torch_backend_does(inputs, model_folder, nightshelf):
    """Vectors, candidates and a search of the catalog in one run."""
    task = BOTH | {"generate": {"exact": True}}
    nightshelf("run", configure(inputs, model_folder, "torch", task))
    want = published(inputs)
    done = run(configure(inputs, model_folder, task=task, workers=1), check=0)
    assert json.loads(done.stdout.splitlines()[-1])["users_recommended"] == 40
    rows = published(inputs)
    assert set(rows["source"]) == {"score", "generate"}
    assert_same_lists(want, rows)
    assert want["exact"].equals(rows["exact"])


def test_labels_and_embeddings_come_out_the_same(inputs, model_folder, nightshelf, double):
    labels = {"k": 5, "label": {"labels": ["w1", "w2"]}}
    nightshelf("run", configure(inputs, model_folder, "torch", labels))
    want = published(inputs)
    nightshelf("run", configure(inputs, model_folder, "trtllm", labels))
    assert_same_lists(want.drop("labels"), published(inputs).drop("labels"))
    embed = {"embed": {"pooling": "mean"}}
    vectors = []
    for backend in ("torch", "trtllm"):
        config = configure(inputs, model_folder, backend, embed)
        found = nightshelf("run", config, "--output", "json").json
        vectors.append(staged(found, "embeddings").sort("user_id")["embedding"].to_numpy())
    assert abs(vectors[0] - vectors[1]).max() < 1e-4


def test_what_the_engine_forwards_is_counted_as_it_is(inputs, model_folder, nightshelf, double):
    """The prompt goes along with every read: the summary does not pretend otherwise (A34)."""
    found = nightshelf("run", configure(inputs, model_folder), "--output", "json").json
    sent = sum(
        len(prompt["prompt_token_ids"])
        for name, kwargs in double.CALLS
        if name == "encode"
        for prompt in kwargs["inputs"]
    )
    probes = 6 + 9 + 8 + 14  # of the self-test
    assert found["rows_forwarded"] == sent - probes
    assert found["reused_tokens"] == 0
    planned = nightshelf("plan", configure(inputs, model_folder), "--output", "json").json
    assert 0.5 * sent <= planned["estimate"]["rows_forwarded"] <= 2 * sent


def test_native_beams_are_counted_and_never_called_exact(inputs, model_folder, nightshelf, double):
    task = {
        "k": 5,
        "score": {},
        "generate": {"width": 24, "mode": "native", "rescore": True, "compare_users": 2},
    }
    config = configure(inputs, model_folder, task=task)
    found = nightshelf("run", config, "--output", "json").json
    counts = found["native_beams"]
    assert counts["beams"] == 40 * 24
    assert 0 < counts["invalid_share"] <= 1
    assert counts["unusable_share"] == 0
    assert 0 <= counts["overlap_with_constrained"] <= 1
    assert found["legal_mass"] is None
    assert found["exact_share"] == 0
    receipts = [json.loads(p.read_text()) for p in Path(found["run_dir"]).glob("receipts/*.json")]
    assert sum(r["native_beams"]["beams"] for r in receipts) == 40 * 24
    catalog = pl.read_parquet(inputs / "catalog.parquet")["item_id"]
    assert published(inputs)["item_id"].is_in(catalog.to_list()).all()


def test_the_choice_of_auto_is_said(inputs, model_folder, nightshelf, double, caplog):
    task = {"k": 5, "generate": {"width": 8, "mode": "auto"}}
    config = configure(inputs, model_folder, task=task)
    found = nightshelf("run", config, "--output", "json").json
    assert "constrained beams, because exclusions would shorten its lists" in caplog.text
    assert "native_beams" not in found


def test_a_build_that_refuses_items_gives_the_same_lists(
    inputs, model_folder, nightshelf, double, caplog
):
    nightshelf("run", configure(inputs, model_folder))
    want = published(inputs)
    double.FAULTS.add("multi_item_refused")
    nightshelf("run", configure(inputs, model_folder, seed=1))  # another run of the same work
    assert "one prompt per item instead of multi-item prompts: refused" in caplog.text
    assert_same_lists(want, published(inputs))


def test_an_engine_that_dies_is_replaced_and_its_shard_tried_again(inputs, model_folder):
    config = configure(inputs, model_folder, workers=1)
    done = run(config, "--set", "run.max_attempts=2", check=4, TRTLLM_DOUBLE_FAULTS="dies")
    assert "illegal memory access" in done.stderr
    assert "trying again" in done.stderr
    assert "given up after 2 attempts" in done.stderr


def test_without_the_library_the_run_says_what_to_install(inputs, model_folder):
    done = run(configure(inputs, model_folder, workers=1), check=5, double=False)
    assert "backend 'trtllm' cannot be loaded: got ModuleNotFoundError" in done.stderr
    assert "nvcr.io/nvidia/tensorrt-llm/release:" in done.stderr
    assert "install tensorrt_llm from NVIDIA's package index" in done.stderr


def test_an_engine_that_cannot_start_says_why(inputs, model_folder, nightshelf, double):
    wrong = configure(inputs, model_folder, trtllm={"placeholder_id": 99})
    assert "placeholder_id" in nightshelf("run", wrong, check=5).err
    wrong = configure(inputs, model_folder, trtllm={"max_beams": 4})
    assert "max_beams" in nightshelf("run", wrong, check=2).err


@pytest.mark.parametrize("block", [0, 1])
def test_the_documented_configurations_are_valid(tmp_path, block):
    page = (ROOT / "docs/trtllm.md").read_text()
    first, *others = (yaml.safe_load(b) for b in re.findall(r"```yaml\n(.*?)```", page, flags=re.S))
    path = tmp_path / "run.yaml"
    shown = [{}, *others][block]
    engine = first["engine"] | shown.get("engine", {})
    path.write_text(yaml.safe_dump(first | shown | {"engine": engine}))
    config = load_config(path)
    assert config.engine.backend == "trtllm"
    assert config.engine.dtype == "bfloat16"
    assert (config.task.generate.mode == "native") is bool(block)

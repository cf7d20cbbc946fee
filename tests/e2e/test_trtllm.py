"""Whole runs with `engine.backend: trtllm`, over the strict double of TensorRT-LLM in worker
processes; and what happens where there is no TensorRT-LLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from tests import trtllm
from tests.cases.helpers import published, staged, write_projector
from tests.factories import write_config, write_inputs

ROOT = Path(__file__).parents[2]
BOTH = {"k": 5, "score": {}, "generate": {"width": 8}}

pytestmark = pytest.mark.skipif(trtllm.installed(), reason="TensorRT-LLM itself is installed")


def run(config, *args, check=0, double=True, **env):
    """`nightshelf run` in a process of its own, which finds the double by PYTHONPATH."""
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


def summary(done):
    return json.loads(done.stdout.splitlines()[-1])


def configure(folder, model, backend="trtllm", task=None, vectors=True, workers=1, **engine):
    settings = {"backend": backend, "model": model, "device": "cpu"} | engine
    template = "{history}"
    if vectors:
        template = "{user_vector} {history}"
        settings["projector"] = str(folder / "projector")
    return write_config(
        folder,
        engine=settings,
        prompt={"template": template, "max_tokens": 60},
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


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_publishes_what_the_torch_backend_does(inputs, model_folder, workers):
    """Vectors, candidates and beams in one run; with a worker process, and without."""
    rows = {}
    for backend in ("torch", "trtllm"):
        found = summary(run(configure(inputs, model_folder, backend, workers=workers)))
        assert found["status"] == "published"
        assert found["users_recommended"] == 40
        rows[backend] = published(inputs)
    assert set(rows["trtllm"]["source"]) == {"score", "generate"}
    assert_same_lists(rows["torch"], rows["trtllm"])
    assert rows["torch"]["exact"].equals(rows["trtllm"]["exact"])


def test_labels_and_embeddings_come_out_the_same(inputs, model_folder):
    labels = {"k": 5, "label": {"labels": ["w1", "w2"]}}
    first = summary(run(configure(inputs, model_folder, "torch", labels)))
    want = published(inputs)
    second = summary(run(configure(inputs, model_folder, "trtllm", labels)))
    assert_same_lists(want.drop("labels"), published(inputs).drop("labels"))
    assert first["rows_published"] == second["rows_published"]
    embed = {"embed": {"pooling": "mean"}}
    vectors = []
    for backend in ("torch", "trtllm"):
        found = summary(run(configure(inputs, model_folder, backend, embed)))
        vectors.append(staged(found, "embeddings").sort("user_id")["embedding"].to_numpy())
    assert abs(vectors[0] - vectors[1]).max() < 1e-4


def test_what_the_engine_forwards_is_counted_as_it_is(inputs, model_folder):
    """The prompt goes along with every read: the summary does not pretend otherwise."""
    torch_run = summary(run(configure(inputs, model_folder, "torch", workers=0)))
    found = summary(run(configure(inputs, model_folder, workers=0)))
    assert found["rows_forwarded"] > torch_run["rows_forwarded"]
    assert found["rows_naive"] == torch_run["rows_naive"]


def test_native_beams_are_counted_and_never_called_exact(inputs, model_folder):
    task = {
        "k": 5,
        "score": {},
        "generate": {"width": 24, "mode": "native", "rescore": True, "compare_users": 2},
    }
    config = configure(inputs, model_folder, task=task)
    config.write_text(config.read_text().replace("exclusions: exclusions.parquet\n", ""))
    found = summary(run(config))
    counts = found["native_beams"]
    assert counts["beams"] == 40 * 24
    assert 0 < counts["invalid_share"] <= 1
    assert 0 <= counts["overlap_with_constrained"] <= 1
    assert found["legal_mass"] is None
    assert found["exact_share"] == 0
    receipts = [json.loads(p.read_text()) for p in Path(found["run_dir"]).glob("receipts/*.json")]
    assert sum(r["native_beams"]["beams"] for r in receipts) == 40 * 24
    catalog = pl.read_parquet(inputs / "catalog.parquet")["item_id"]
    assert published(inputs)["item_id"].is_in(catalog.to_list()).all()


def test_the_choice_of_auto_is_said(inputs, model_folder):
    task = {"k": 5, "generate": {"width": 8, "mode": "auto"}}
    done = run(configure(inputs, model_folder, task=task))
    assert "constrained beams, because exclusions would shorten its lists" in done.stderr
    assert "native_beams" not in summary(done)


def test_a_build_that_refuses_items_gives_the_same_lists(inputs, model_folder):
    run(configure(inputs, model_folder))
    want = published(inputs)
    config = configure(inputs, model_folder, seed=1)  # another run of the same work
    done = run(config, TRTLLM_DOUBLE_FAULTS="multi_item_refused")
    assert "one prompt per item instead of multi-item prompts: refused" in done.stderr
    assert_same_lists(want, published(inputs))


def test_an_engine_that_dies_is_replaced_and_the_shard_fails_in_the_end(inputs, model_folder):
    done = run(configure(inputs, model_folder), check=4, TRTLLM_DOUBLE_FAULTS="dies")
    assert "illegal memory access" in done.stderr
    assert "trying again" in done.stderr
    assert "given up after 3 attempts" in done.stderr


@pytest.mark.parametrize("workers", [0, 1])
def test_without_the_library_the_run_says_what_to_install(inputs, model_folder, workers):
    config = configure(inputs, model_folder, workers=workers)
    done = run(config, check=5, double=False)
    assert "needs TensorRT-LLM, which cannot be loaded" in done.stderr
    assert "nvcr.io/nvidia/tensorrt-llm/release:" in done.stderr
    assert "pip install tensorrt_llm" in done.stderr


def test_an_engine_that_cannot_start_says_why(inputs, model_folder):
    done = run(configure(inputs, model_folder, trtllm={"placeholder_id": 99}), check=5)
    assert "placeholder_id" in done.stderr
    done = run(configure(inputs, model_folder, trtllm={"max_beams": 4}), check=2)
    assert "max_beams" in done.stderr

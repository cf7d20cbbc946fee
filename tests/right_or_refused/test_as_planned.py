"""What was planned is what is read: an input or a model that is replaced meanwhile is noticed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import polars as pl
import pytest

from tests.factories import tiny_model, write_config, write_inputs

OUT = "out/ds=2026-11-28/surface=home"
TABLES = ("users", "catalog", "candidates", "exclusions")


def replaced(path: Path) -> None:
    """Another content of the same size at once, as a deploy does it."""
    draft = path.with_suffix(".new")
    shutil.copy(path, draft)
    os.utime(draft, ns=(1, 1))
    os.replace(draft, path)


@pytest.fixture
def config(tmp_path):
    write_inputs(tmp_path, num_users=18)
    return write_config(tmp_path, run__shard_users=6, run__workers=0, task__score={})


def after(monkeypatch, where: str, act) -> None:
    """Do something once a function of the product has returned, the first time."""
    module, _, name = where.rpartition(".")
    import importlib

    plain = getattr(importlib.import_module(module), name)
    left = [act]

    def call(*args, **kwargs):
        out = plain(*args, **kwargs)
        if left:
            left.pop()()
        return out

    monkeypatch.setattr(where, call)


@pytest.mark.parametrize("table", TABLES)
def test_an_input_that_is_replaced_after_it_was_planned_is_named(
    nightshelf, tmp_path, config, monkeypatch, table
):
    path = tmp_path / f"{table}.parquet"
    after(monkeypatch, "jobs.running.run.plan_run", lambda: replaced(path))
    done = nightshelf("run", config, "--output", "json", check=4)
    assert f"{table}: a file has changed since the run was planned" in done.err
    assert str(path) in done.err
    assert done.json["error"]["kind"] == "changed"
    assert not (tmp_path / OUT).exists()
    monkeypatch.undo()
    nightshelf("run", config)


@pytest.mark.parametrize("table", TABLES)
def test_an_input_that_goes_while_its_run_works_is_named(
    nightshelf, tmp_path, config, monkeypatch, table
):
    path = tmp_path / f"{table}.parquet"
    after(monkeypatch, "jobs.running.run.audit_step", path.unlink)
    done = nightshelf("run", config, check=4)
    assert "it is gone" in done.err
    assert not (tmp_path / OUT).exists()


def test_an_input_that_is_replaced_while_it_is_split_is_named(
    nightshelf, tmp_path, config, monkeypatch
):
    users = tmp_path / "users.parquet"
    after(monkeypatch, "pipelines.inputs.prepare._split", lambda: replaced(users))
    done = nightshelf("run", config, check=4)
    assert "users: a file has changed since the run was planned" in done.err
    assert not list(tmp_path.glob("runs/*/shards/_done"))


@pytest.fixture
def modelled(tmp_path):
    write_inputs(tmp_path, num_users=6)
    model = tiny_model(tmp_path / "model")
    config = write_config(
        tmp_path,
        engine={"backend": "torch", "model": model, "device": "cpu"},
        prompt__template="{history}",
        prompt__max_tokens=200,
        run__workers=0,
    )
    return config, tmp_path / "model"


def other_weights(model: Path) -> None:
    """The weights of another model, at once."""
    import safetensors.torch

    path = model / "model.safetensors"
    weights = {k: v + 0.5 for k, v in safetensors.torch.load_file(path).items()}
    safetensors.torch.save_file(weights, model / "new", metadata={"format": "pt"})
    os.replace(model / "new", path)


@pytest.mark.parametrize(
    "moment",
    ["jobs.running.run.plan_run", "jobs.running.run.prepare_step", "jobs.running.run.audit_step"],
)
def test_a_model_that_is_replaced_is_named(nightshelf, modelled, tmp_path, monkeypatch, moment):
    config, model = modelled
    after(monkeypatch, moment, lambda: other_weights(model))
    done = nightshelf("run", config, "--output", "json", check=4)
    assert "the model has changed since the run was planned" in done.err
    assert "model.safetensors" in done.err
    assert done.json["error"]["kind"] == "changed"
    assert not (tmp_path / OUT).exists()


def test_a_model_with_the_same_content_may_take_its_place(
    nightshelf, modelled, tmp_path, monkeypatch
):
    config, model = modelled
    after(monkeypatch, "jobs.running.run.plan_run", lambda: replaced(model / "model.safetensors"))
    nightshelf("run", config)
    assert len(pl.read_parquet(tmp_path / OUT)) > 0


def test_hidden_files_of_a_download_are_no_part_of_a_model(nightshelf, modelled):
    config, model = modelled
    first = nightshelf("plan", config, "--output", "json").json["run_id"]
    (model / ".cache" / "huggingface").mkdir(parents=True)
    (model / ".cache" / "huggingface" / "x.metadata").write_text("now")
    assert nightshelf("plan", config, "--output", "json").json["run_id"] == first

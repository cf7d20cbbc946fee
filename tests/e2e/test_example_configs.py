"""Every configuration of `examples/configs` validates and runs on what its script makes."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import yaml

from tests.e2e.golden_rows import (
    CONFIGS,
    EXAMPLES,
    GOLDEN,
    HASHES,
    hash_of,
    make_example,
    rows_of,
    run_fake,
)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A copy of the folder with its inputs."""
    return make_example(tmp_path_factory.mktemp("configs"))


def run(nightshelf, config: Path, *more: str) -> tuple[dict, pl.DataFrame]:
    report = nightshelf("validate", config, *more, "--output", "json").json
    assert report["problems"] == report["warnings"] == []
    out = config.parent / f"out-{config.stem}"
    args = ["--set", "run.workers=0", "--set", f"output.path={out}", *more, "--output", "json"]
    return nightshelf("run", config, *args).json, pl.read_parquet(out, hive_partitioning=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_validates_and_runs(nightshelf, example, name):
    summary, rows = run(nightshelf, example / name)
    config = yaml.safe_load((example / name).read_text())
    assert summary["status"] == "published"
    assert summary["users_recommended"] == summary["users_in"] == 50
    assert summary["users_quarantined"] == 0
    assert rows["source"].unique().is_in([t for t in config["task"] if t in
                                          ("score", "generate", "label")]).all()  # fmt: skip
    assert rows.group_by("user_id").len()["len"].max() <= config["task"]["k"]
    assert rows["score"].is_finite().all()


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_those_that_were_written_down(nightshelf, example, name):
    rows = run_fake(nightshelf, example, name)
    assert hash_of(rows) == json.loads(HASHES.read_text())[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_of_a_model_are_those_that_were_written_down(nightshelf, example, name):
    """The last bits are the processor's: lists may differ only in the order of equal scores."""
    run(nightshelf, example / name)
    wanted = pl.read_parquet(GOLDEN / f"{Path(name).stem}.parquet")
    got = rows_of(example / f"out-{Path(name).stem}")
    both = wanted.join(got, on=["user_id", "rank"], how="full", suffix="_got", coalesce=True)
    assert both["score"].is_null().sum() == both["score_got"].is_null().sum() == 0
    assert (both["score"] - both["score_got"]).abs().max() <= 1e-5
    moved = both.filter(pl.col("item_id") != pl.col("item_id_got"))
    near = moved.select("user_id", "score").join(wanted, on="user_id", suffix="_other")
    near = near.filter((pl.col("score") - pl.col("score_other")).abs() <= 1e-5)
    assert (near.group_by("user_id", "score").len()["len"] > 1).all()


def test_the_combined_one_keeps_its_promises(nightshelf, example):
    _, rows = run(nightshelf, example / "combined.yaml")
    users = pl.read_parquet(example / "build/users.parquet").select("user_id", "country")
    catalog = pl.read_parquet(example / "build/catalog.parquet")
    rows = rows.join(users, on="user_id").join(catalog, on="item_id")
    assert rows.select(pl.col("markets").list.contains(pl.col("country"))).to_series().all()
    assert not rows["adult"].any()
    assert set(rows["source"]) == {"score", "generate"}
    first = rows.with_columns(code=pl.col("sid").list.first())
    assert first.group_by("user_id", "code").len()["len"].max() <= 3


def test_soft_tokens_are_proven_exact(nightshelf, example):
    summary, rows = run(nightshelf, example / "soft_token.yaml")
    assert rows["exact"].all()
    assert summary["exact_share"] == 1.0


def test_two_surfaces_stand_side_by_side(nightshelf, example):
    run(nightshelf, example / "multi_surface.yaml")
    _, rows = run(nightshelf, example / "multi_surface.yaml", "--set", "surface=email", "--set",
                  "task.k=5")  # fmt: skip
    most = rows.group_by("surface", "user_id").len().group_by("surface").agg(pl.col("len").max())
    assert dict(most.iter_rows()) == {"home": 10, "email": 5}


def test_the_page_names_every_configuration():
    page = (EXAMPLES / "README.md").read_text()
    assert [name for name in CONFIGS if f"`{name}`" not in page] == []

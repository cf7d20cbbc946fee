"""A backend of one's own, as docs/backends.md says: by its place, or by a name of its package."""

from __future__ import annotations

import math
from pathlib import Path

import polars as pl
import pytest

from engine.backends.registry import available, spec_of
from tests.factories import write_config, write_inputs

EXAMPLE = Path(__file__).parents[2] / "examples" / "backend"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """As pip leaves a package that has the entry point."""
    info = tmp_path / "site" / "bigram-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bigram\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nightshelf.backends]\nbigram = bigram:SPEC\n")
    monkeypatch.syspath_prepend(tmp_path / "site")


def published(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "out", hive_partitioning=True)


def test_it_scores_by_its_place_and_by_its_name(nightshelf, tmp_path, installed):
    write_inputs(tmp_path)
    rows = []
    for name in ("bigram:SPEC", "bigram"):
        config = write_config(
            tmp_path, engine__backend=name, task={"k": 3, "generate": {"width": 9}}
        )
        nightshelf("validate", config)
        nightshelf("run", config)
        rows.append(published(tmp_path).drop("run_id"))
    assert rows[0].equals(rows[1])
    # Nothing was counted: every token is as likely, and an item has three of 4,096.
    assert rows[0]["score"].unique().to_list() == [pytest.approx(-3 * math.log(4096), abs=1e-5)]
    assert rows[0].group_by("user_id").len()["len"].unique().to_list() == [3]


def test_it_scores_what_it_counted(tmp_path):
    from engine.backends.registry import create_backend
    from schemas.settings import EngineSettings

    (tmp_path / "counts.txt").write_text("1 2 3\n1 2 2\n")
    settings = EngineSettings(
        backend="bigram:SPEC", model=str(tmp_path / "counts.txt"), options={"smoothing": 0.5}
    )
    log_p = create_backend(settings)._log_p
    assert float(log_p[1, 2]) == pytest.approx(math.log(2.5 / (4096 * 0.5 + 2)), abs=1e-5)


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("bigram:SPEC", {"smoothing": -1}, "engine.options.smoothing"),
        ("bigram:SPEC", {"smothing": 1}, "engine.options.smothing"),
        ("fake", {"smoothing": 1}, "takes no engine.options"),
    ],
)
def test_options_are_held_to_what_it_takes(nightshelf, tmp_path, backend, options, words):
    write_inputs(tmp_path)
    config = write_config(tmp_path, engine__backend=backend, engine__options=options)
    for command in ("validate", "plan", "run"):
        done = nightshelf(command, config, "--output", "json", check=2)
        assert words in done.out, command
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_names_are_known_and_guessed(nightshelf, installed):
    assert available() == ["bigram", "fake", "torch", "trtllm"]
    assert spec_of("bigram").name == "bigram"
    done = nightshelf("doctor", "--backend", "bigrm", check=2)
    assert "did you mean 'bigram'" in done.err


def test_native_beams_are_refused_when_planning(nightshelf, tmp_path):
    write_inputs(tmp_path)
    task = {"k": 3, "generate": {"width": 9, "mode": "native"}}
    config = write_config(tmp_path, engine__backend="bigram:SPEC", task=task)
    assert "beams of its own" in nightshelf("plan", config, check=2).err
    nightshelf("validate", config, check=2)

"""All problems of a configuration at once: none hides another, and none is made up."""

from __future__ import annotations

import copy
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.config_file import load_config
from schemas.config_problems import inspect_config
from schemas.errors import ConfigError

BASE: dict[str, Any] = {
    "surface": "home",
    "ds": "2026-11-28",
    "engine": {"backend": "fake"},
    "sid": {"sizes": [5, 4, 6], "tokens": ["<a_{code}>", "<b_{code}>", "<c_{code}>"]},
    "prompt": {"template": "Hi {history}"},
    "inputs": {"users": "u.parquet", "catalog": "c.parquet"},
    "task": {"k": 5, "generate": {"width": 8}},
    "output": {"path": "out"},
    "run": {"shard_users": 10},
}
GONE = object()

# What is done to a right configuration, and the setting that is named.
MUTATIONS: dict[str, tuple[str, Any]] = {
    "surface": ("surface", GONE),
    "surfaces": ("surfaces", "x"),
    "ds": ("ds", "28.11.2026"),
    "engine.dtype": ("engine.dtype", "float8"),
    "engine.modle": ("engine.modle", "x"),
    "sid.sizes": ("sid.sizes", [5, 0, 6]),
    "prompt.template": ("prompt.template", "{history"),
    "prompt.max_tokens": ("prompt.max_tokens", "long"),
    "inputs.users": ("inputs.users", GONE),
    "inputs.candidates": ("task.score", {}),
    "task.k": ("task.k", 0),
    "task.eligibility": ("task.eligibility", "a b"),
    "task.generate.width": ("task.generate.width", [1, 2, 3, 4]),
    "task.quota.max_items": ("task.quota", {"level": 1}),
    "task.score_norm": ("task.score_norm", "all"),
    "output.path": ("output.path", GONE),
    "output.table": ("output.table", "x"),
    "output.catalog": ("output", {"path": "o", "format": "iceberg", "catalog": {"token": "x"}}),
    "run.work_dir": ("run.work_dir", "runs/{ds}"),
    "run.workers": ("run.workers", -1),
    "audit.min_coverage": ("audit.min_coverage", 2),
    "audit.warn": ("audit.warn", ["nothing"]),
}
# Settings that cannot be told once another is gone: its section's, and what needs the section.
UNTOLD = {
    "sid.sizes": {
        "inputs.candidates",
        "task.generate.width",
        "run.work_dir",
    },
    "output.catalog": {"output.path", "output.table"},
    "output.path": {"output.catalog"},
    "output.table": {"output.catalog"},
}


def write(folder: Path, *names: str) -> Path:
    config = copy.deepcopy(BASE)
    for name in names:
        key, value = MUTATIONS[name]
        *parents, leaf = key.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is GONE:
            node.pop(leaf, None)
        else:
            node[leaf] = copy.deepcopy(value)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def fields(path: Path) -> list[str]:
    report = inspect_config(path)
    assert report.config is not None
    lines = [f"{path}:{n}" for n in range(1, len(path.read_text().splitlines()) + 1)]
    assert all(problem.where in lines for problem in report.problems)
    return [problem.field or "" for problem in report.problems]


def test_a_right_configuration_has_none(tmp_path):
    path = write(tmp_path)
    report = inspect_config(path)
    assert report.problems == ()
    assert report.repaired == frozenset()
    assert report.config == load_config(path)


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_is_named_and_refused(tmp_path, name):
    path = write(tmp_path, name)
    assert fields(path) == [name]
    with pytest.raises(ConfigError):
        load_config(path)


def test_of_two_both_are_named(tmp_path):
    for one, other in combinations(MUTATIONS, 2):
        if other in UNTOLD.get(one, ()) or one in UNTOLD.get(other, ()):
            continue
        assert sorted(fields(write(tmp_path, one, other))) == sorted((one, other))


def test_many_at_once(tmp_path):
    names = [n for n in MUTATIONS if n not in ("output.catalog", "sid.sizes")]
    assert sorted(fields(write(tmp_path, *names))) == sorted(names)


def test_what_was_replaced_is_told(tmp_path):
    report = inspect_config(write(tmp_path, "inputs.users", "task.k"))
    assert report.is_repaired("inputs.users")
    assert report.is_repaired("inputs")
    assert not report.is_repaired("inputs.catalog")
    assert report.config.task.k == 20, "the default stands in"
    assert report.config.task.generate.width == 8, "the rest is what was written"

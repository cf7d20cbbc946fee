"""The folders are the architecture: import-linter holds the layers, this holds the rest."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("package", ["schemas", "engine", "pipelines", "jobs", "nightshelf"])
def test_the_packages_are_ours(package):
    found = Path(importlib.import_module(package).__file__)
    assert found.parent == ROOT / package


def test_no_package_shadows_airflow():
    assert not list(ROOT.glob("airflow/**/__init__.py"))


@pytest.mark.parametrize(
    "module",
    [
        "engine.backend",
        "engine.backends.registry",
        "engine.packing.packs",
        "engine.trees.sid_trie",
        "engine.trees.token_tree",
        "engine.prompts.tokenizer",
        "engine.prompts.builder",
        "engine.prompts.projector_spec",
        "engine.device",
        "engine.checkpoints.files",
        "engine.prompts.sid_vocabulary",
    ],
)
def test_what_the_driver_reads_of_the_engine_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_command_line_starts_without_what_only_a_step_needs():
    """Heavy libraries wait for the step that needs them; a report's for the report."""
    heavy = {"torch", "transformers", "pyspark", "matplotlib", "jinja2", "selenium"}
    code = f"import sys, jobs.cli.app; sys.exit(', '.join({heavy!r} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

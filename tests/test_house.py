"""The house stays one that a stranger can live in: where names may stand, and how large things get.

Import-linter holds the order of the rooms (pyproject.toml).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from engine.tasks import TASKS

ROOT = Path(__file__).parents[1]
FOLDERS = ("schemas", "engine", "pipelines", "jobs")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in FILES}


def attributes_of(tree: ast.AST, owner: str) -> Iterator[str]:
    """Names that are asked of something called `owner`, as in `config.owner.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            value = node.value
            name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", None)
            if name == owner:
                yield node.attr


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file}:{node.lineno} {node.name}", node


def test_which_task_a_run_has_is_asked_in_few_files():
    """A task is one module in engine/tasks, and its section in schemas/task_settings.py."""
    names = {task.name for task in TASKS}
    asking = {file for file, tree in TREES.items() if names & set(attributes_of(tree, "task"))}
    assert asking <= {f"engine/tasks/{name}.py" for name in names}


def test_every_task_has_a_module_of_its_name():
    assert {f"engine.tasks.{task.name}" for task in TASKS} == {task.__module__ for task in TASKS}


def test_which_backend_a_run_has_is_asked_nowhere():
    """What differs between backends is in their `BackendSpec`, and what they say when started."""
    asking = []
    for file, tree in TREES.items():
        if file.startswith("engine/backends/"):
            continue
        for node in ast.walk(tree):
            named = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
            asks = isinstance(node, ast.Compare) and "backend" in ast.unparse(node)
            if (asks and named & {"torch", "trtllm", "fake"}) or (
                isinstance(node, ast.Constant) and node.value == "trtllm"
            ):
                asking.append(f"{file}:{node.lineno}")
    assert asking == []


LONG = {"look_around"}  # travels to executors as the code of one function
MANY = {"token_tree_attention"}  # what transformers calls an attention with


LARGE = {  # still to be split
    "engine/backends/torch/tree_attention.py": 384,
    "pipelines/catalog/build.py": 421,
    "pipelines/catalog/check.py": 434,
    "pipelines/catalog/readers.py": 431,
    "pipelines/evaluation/compare.py": 376,
    "pipelines/evaluation/evaluate.py": 364,
}


def test_files_are_of_one_idea():
    lines = {file: len((ROOT / file).read_text().splitlines()) for file in TREES}
    assert {f: n for f, n in lines.items() if n > LARGE.get(f, 350)} == {}


def test_functions_can_be_read_without_scrolling():
    long = {node.name for _, node in functions() if node.end_lineno - node.lineno + 1 > 60}
    assert long <= LONG


def test_functions_take_few_parameters():
    """`self` is not counted, nor are the options of a command."""
    many = set()
    for name, node in functions():
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if sum(arg.arg not in ("self", "cls") for arg in args) > 7 and "jobs/cli" not in name:
            many.add(node.name)
    assert many <= MANY

"""What executors are like: their Python, their packages, and what they see of the run's folders.

`look_around` travels to the executors as code, not as a name, and imports nothing that is not in
Python itself: so that it also works, and can say so, where nightshelf is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from engine.backends.registry import spec_of
from schemas.errors import ConfigError, EngineError
from schemas.runs import RunPlan

_PACKAGES = ("polars", "pyarrow", "numpy", "pydantic", "fsspec", "xxhash", "tokenizers")


def questions(plan: RunPlan) -> dict[str, Any]:
    """What to ask executors about a run."""
    spec = spec_of(plan.config.engine.backend)
    packages = [*_PACKAGES, *spec.packages]
    folders = {
        f"engine.{name}": path
        for name in ("model", "projector")
        if (path := getattr(plan.config.engine, name)) is not None
    }
    return {
        "packages": packages,
        "modules": ["nightshelf", "jobs", "pipelines", "engine", "schemas"],
        "run_dir": plan.run_dir,
        "folders": folders,
        "gpus": plan.config.engine.device == "auto" and spec.gpu != "never",
    }


def look_around(asked: str) -> str:
    """Answer the questions on the machine where this runs. JSON in, JSON out."""
    import importlib
    import importlib.metadata
    import importlib.util
    import json
    import os
    import platform
    import shutil
    import socket
    import subprocess
    import sys
    import uuid

    wanted = json.loads(asked)
    versions, missing = {}, []
    for name in ["nightshelf", *wanted["packages"]]:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "nightshelf":  # it may come as files, without metadata
                missing.append(name)
    if any(importlib.util.find_spec(name) is None for name in wanted["modules"]):
        missing.insert(0, "nightshelf")
    problems, listed = {}, {}
    if not missing:
        importlib.import_module("nightshelf")  # first: our packages win from here on
        files = importlib.import_module("pipelines.storage.files")
        try:
            files.read_bytes(files.join(wanted["run_dir"], "plan.json"))
        except Exception as err:  # whatever the store's library raises; it is told to a person
            problems["unseen"] = f"{type(err).__name__}: {err}"
        else:
            path = files.join(wanted["run_dir"], "attempts", f".probe-{uuid.uuid4().hex[:8]}")
            try:
                files.write_bytes(path, b"")
                files.remove(path)
            except Exception as err:
                problems["unwritable"] = f"{type(err).__name__}: {err}"
    for setting, folder in wanted["folders"].items():
        found = sorted(
            (os.path.relpath(os.path.join(at, name), folder), os.stat(os.path.join(at, name)))
            for at, _, names in os.walk(folder)
            for name in names
        )
        listed[setting] = [[name, stat.st_size] for name, stat in found]
    gpus = 0
    if wanted["gpus"] and shutil.which("nvidia-smi"):
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        gpus = sum(line.startswith("GPU ") for line in said.stdout.splitlines())
    return json.dumps(
        {
            "host": socket.gethostname(),
            "gpus": gpus,
            "python": platform.python_version(),
            "executable": sys.executable,
            "versions": versions,
            "missing": missing,
            "problems": problems,
            "listed": listed,
        }
    )


def answering(asked: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """`look_around` for `mapInArrow`: one answer per partition, in a column `answer`."""

    def look(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        for _ in batches:
            pass
        yield pyarrow.RecordBatch.from_pylist([{"answer": look_around(asked)}])

    return look


def check_answers(plan: RunPlan, answers: Iterable[str], *, handed_out: bool = True) -> list[str]:
    """Compare executors with this driver; notes about what differs and may be meant so.

    Args:
        handed_out: whether Spark gives its tasks GPUs.

    Raises:
        EngineError: nightshelf or a package it needs is missing on an executor, or is another
            nightshelf, or the model is not there.
        ConfigError: an executor cannot read or write the run's folder, or has GPUs that nobody
            would use.
    """
    here = json.loads(look_around(json.dumps(questions(plan))))
    notes: dict[str, None] = {}
    for text in answers:
        there = json.loads(text)
        _check_packages(there, here)
        _check_folders(plan, there, here)
        if there["gpus"] and not handed_out:
            raise ConfigError(
                "an executor has GPUs that Spark does not hand out",
                expected=f"spark.executor.resource.{plan.config.spark.resource}.amount and "
                f"spark.task.resource.{plan.config.spark.resource}.amount, or engine.device: cpu",
                got=f"{there['gpus']} GPUs, engine.device: auto",
                where=f"host {there['host']}",
                do="On one machine the local launcher uses every GPU: nightshelf run CONFIG.",
            )
        for name, version in there["versions"].items():
            if here["versions"].get(name) != version and name != "nightshelf":
                notes[
                    f"executor {there['host']} has {name} {version}, the driver "
                    f"{here['versions'].get(name, 'none')}"
                ] = None
    return list(notes)


def _check_packages(there: dict[str, Any], here: dict[str, Any]) -> None:
    where = f"host {there['host']}, {there['executable']}"
    if there["missing"]:
        raise EngineError(
            "packages are missing on an executor",
            expected=", ".join(there["missing"]),
            got=f"Python {there['python']} without them",
            where=where,
            do="Ship one environment with --archives and point spark.pyspark.python into it, or "
            "use an image that has them; see docs/spark.md.",
        )
    mine, theirs = (at["versions"].get("nightshelf") for at in (here, there))
    if mine != theirs and None not in (mine, theirs):
        raise EngineError(
            "an executor has another nightshelf than the driver",
            expected=mine,
            got=theirs,
            where=where,
        )


def _check_folders(plan: RunPlan, there: dict[str, Any], here: dict[str, Any]) -> None:
    where = f"host {there['host']}, {plan.run_dir}"
    if "unseen" in there["problems"]:
        raise ConfigError(
            "an executor cannot read the run's folder",
            expected="run.work_dir on storage that the driver and every executor see",
            got=there["problems"]["unseen"],
            where=where,
            do="Use a mounted file system, or an object store (s3://…) with credentials on "
            "executors.",
        )
    if "unwritable" in there["problems"]:
        raise ConfigError(
            "an executor cannot write into the run's folder",
            expected="run.work_dir writable by the user that executors run as",
            got=there["problems"]["unwritable"],
            where=where,
        )
    for setting, listed in there["listed"].items():
        if listed != here["listed"][setting]:
            raise EngineError(
                f"{setting} is not the same on an executor",
                expected=_size_words(here["listed"][setting]),
                got=_size_words(listed),
                where=f"host {there['host']}",
                do="Put it at the same path on every machine: a shared file system, or the image.",
            )


def _size_words(listed: Sequence[Sequence[Any]]) -> str:
    if not listed:
        return "nothing there"
    return f"{len(listed)} files of {sum(size for _, size in listed):,} bytes"

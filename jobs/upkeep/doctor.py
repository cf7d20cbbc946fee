"""Is this machine ready? Python, packages, devices, Java, disks and limits, and a tiny self-test.

Nothing heavy is imported here: what needs torch runs in `engine.self_test`, in a process of its own
with a time limit.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from engine.backends.registry import spec_of
from engine.device import num_cpus
from schemas.checks import Check

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_DISTRIBUTION = "nightshelf"
_OPTIONAL = {  # what an extra is for
    "spark": "Spark launcher",
    "iceberg": "Iceberg tables",
    "delta": "Delta tables",
    "s3": "inputs and outputs on S3",
    "report": "the page of a run",
    "metrics": "a Prometheus textfile",
}
_OTHER_STORES = {"gcsfs": "Google Cloud Storage", "adlfs": "Azure storage"}
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")
_LEAST_DISK = 1 << 30
_LEAST_FILES = 1024  # prepare writes one file per shard at once
_SELF_TEST_S, _MODEL_S = 300, 1800
_PINNED = "pip install -c constraints.txt -e '.[torch]'"


def run_doctor(backend: str, model: str | None) -> Iterator[Check]:
    """Every check, in the order people read them."""
    yield _python()
    if find_spec("packaging") is None:
        detail = "packaging is not installed: versions of packages cannot be compared"
        yield Check("packages", ok=False, detail=detail, remedy=f"Install it: {_PINNED}")
    else:
        yield from _packages(backend)
    yield from _java()
    yield _cpu()
    yield _gpus(backend)
    yield _memory()
    yield from _disks()
    yield _open_files()
    yield from self_test(backend, model)


def _python() -> Check:
    ok = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} at {sys.executable}"
    return Check("Python", ok, detail, "" if ok else "Use Python 3.11 or later.")


# --- packages -------------------------------------------------------------------------------------


def _requirements() -> list[Requirement]:
    """What the installed package says it needs, extras included."""
    from packaging.requirements import Requirement

    return [Requirement(line) for line in metadata.requires(_DISTRIBUTION) or []]


def _of_extra(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement is there because of an extra alone."""
    marker = requirement.marker
    if marker is None:
        return extra == ""
    return marker.evaluate({"extra": extra}) and (extra == "" or not marker.evaluate({"extra": ""}))


def _packages(backend: str) -> Iterator[Check]:
    """Packages without which nothing runs, then those of things that a run may do without. The fake
    backend needs torch, but no transformers.
    """
    from packaging.requirements import Requirement

    try:
        needed = _requirements()
    except metadata.PackageNotFoundError:
        detail = "nightshelf itself is not installed in this environment"
        yield Check("packages", ok=False, detail=detail, remedy=f"Install it: {_PINNED}")
        return
    for requirement in needed:
        needed_by_it = requirement.name in spec_of(backend).packages or requirement.name == "torch"
        if _of_extra(requirement, "") or (_of_extra(requirement, "torch") and needed_by_it):
            yield _package(requirement, f"Install it: {_PINNED}")
    for extra, purpose in _OPTIONAL.items():
        install = f"Install it: pip install -c constraints.txt -e '.[{extra}]'"
        for requirement in needed:
            if _of_extra(requirement, extra):
                yield _package(requirement, install, purpose)
    for name, purpose in _OTHER_STORES.items():
        yield _package(Requirement(name), f"Install it: pip install {name}", purpose)


def _package(requirement: Requirement, install: str, purpose: str | None = None) -> Check:
    """One package against the versions we take; with a purpose it is optional."""
    name = requirement.name if purpose is None else f"{requirement.name} ({purpose})"
    wanted = str(requirement.specifier) or "any version"
    found = _installed(requirement.name)
    if found is None and purpose is not None:
        return Check(name, ok=True, detail="not installed (optional)", remedy=install)
    if found is None:
        return Check(name, ok=False, detail=f"not installed, needed {wanted}", remedy=install)
    ok = requirement.specifier.contains(found, prereleases=True)
    return Check(name, ok, f"{found}, needed {wanted}", "" if ok else install)


# --- Java and Spark -------------------------------------------------------------------------------


def _java() -> Iterator[Check]:
    """Java is needed where pyspark is installed; Spark 4 runs on Java 17 and later."""
    pyspark = _installed("pyspark")
    if pyspark is None:
        return
    client = _installed("pyspark-client")
    if client is not None:
        yield Check(
            "pyspark and pyspark-client",
            ok=False,
            detail=f"pyspark {pyspark} and pyspark-client {client} own the same folder",
            remedy="Keep Airflow (which brings pyspark-client) and Spark in two environments.",
        )
    yield _java_version()
    yield _spark_import(pyspark)
    home = os.environ.get("SPARK_HOME")
    if home:
        yield _spark_home(home, pyspark)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _java_version() -> Check:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    remedy = "Install a JDK, 17 or later, and set JAVA_HOME to it."
    text = _output_of([java, "-version"])
    match = re.search(r'version "(\d+)', text or "")
    if text is None or match is None:
        detail = f"{java} does not run" if text is None else text.strip().partition("\n")[0]
        return Check("Java (Spark)", ok=False, detail=detail, remedy=remedy)
    ok = int(match[1]) >= 17
    detail = text.strip().partition("\n")[0]
    return Check("Java (Spark)", ok, detail, "" if ok else remedy)


def _spark_import(version: str) -> Check:
    text = _output_of([sys.executable, "-c", "import pyspark; print(pyspark.__version__)"])
    ok = text is not None and text.strip() == version
    detail = f"pyspark {version} imports" if ok else f"pyspark {version}: {(text or 'no')[-200:]}"
    remedy = "" if ok else "Install it again in a clean environment: pip install pyspark."
    return Check("pyspark", ok, detail, remedy)


def _spark_home(home: str, pyspark: str) -> Check:
    """Driver and cluster must have one minor version."""
    text = _output_of([str(Path(home, "bin", "spark-submit")), "--version"]) or ""
    match = re.search(r"version (\d+\.\d+)", text)
    ok = match is not None and pyspark.startswith(match[1] + ".")
    found = match[1] if match else "not known"
    detail = f"SPARK_HOME {home} is {found}, pyspark is {pyspark}"
    remedy = "" if ok else "Install the pyspark of that Spark, or unset SPARK_HOME."
    return Check("Spark versions", ok, detail, remedy)


def _output_of(command: list[str]) -> str | None:
    """What a command prints on both streams; None when it cannot run, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout + done.stderr


# --- the machine ----------------------------------------------------------------------------------


def _cpu() -> Check:
    """Processors, and the instructions that make bfloat16 fast."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    flags = set(re.findall(r"[\w.]+", next(iter(re.findall(r"^flags\s*:(.*)$", text, re.M)), "")))
    has = ", ".join(f for f in _CPU_FLAGS if f in flags) or "none of " + ", ".join(_CPU_FLAGS)
    model = next(iter(re.findall(r"^model name\s*:\s*(.*)$", text, re.M)), platform.machine())
    detail = f"{num_cpus()} processors, {model}; {has}"
    slow = not flags & {"avx512_bf16", "amx_bf16"}
    advice = "bfloat16 is slow on this CPU; engine.dtype: float32 is as fast." if slow else ""
    return Check("CPU", ok=True, detail=detail, remedy=advice)


def _gpus(backend: str) -> Check:
    """GPUs that the driver sees; those that torch sees are in the self-test."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    text = _output_of(query)
    if text is not None and text.strip():
        return Check("GPUs", ok=True, detail="; ".join(text.strip().splitlines()))
    if spec_of(backend).gpu == "needed":
        remedy = "Run on a machine with an NVIDIA GPU and its driver (nvidia-smi must work)."
        return Check("GPUs", ok=False, detail="none", remedy=remedy)
    return Check("GPUs", ok=True, detail="none (optional); runs use the CPU")


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Check("memory", ok=True, detail=f"{total / 1e9:,.1f} GB")


def _disks() -> Iterator[Check]:
    """Where runs and temporary files go, unless the configuration says other."""
    for name, folder in (
        ("disk here", os.getcwd()),
        ("disk for temporary files", tempfile.gettempdir()),
    ):
        free = shutil.disk_usage(folder).free
        writable = os.access(folder, os.W_OK)
        ok = free >= _LEAST_DISK and writable
        detail = f"{free / 1e9:,.1f} GB free at {folder}" + ("" if writable else ", not writable")
        remedy = "Free some space, or set run.work_dir (TMPDIR) to a larger disk."
        yield Check(name, ok, detail, "" if ok else remedy)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES
    detail = f"{soft:,} (at most {hard:,}); a run opens about one file per shard"
    remedy = "" if ok else "Raise it before a run: ulimit -n 65536."
    return Check("open files", ok, detail, remedy)


# --- the self-test --------------------------------------------------------------------------------


def self_test(backend: str, model: str | None, limit_s: float | None = None) -> list[Check]:
    """Score a little in a process of its own; a crash or a hang is a check that failed."""
    name = f"self-test, {backend} backend"
    if _installed("torch") is None:
        return [Check(name, ok=False, detail="needs torch", remedy=f"Install it: {_PINNED}")]
    command = [sys.executable, "-m", "engine.self_test", "--backend", backend]
    command += ["--model", model] if model is not None else []
    limit = limit_s or (_SELF_TEST_S if model is None else _MODEL_S)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=_environment(), check=False
        )
    except subprocess.TimeoutExpired:
        detail = f"no answer in {limit:,.0f} s"
        return [Check(name, ok=False, detail=detail, remedy=f"Run it by hand: {_by_hand(command)}")]
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return [Check(**one) for one in found]
    except (IndexError, ValueError, TypeError):
        last_line = (done.stderr.strip().splitlines() or ["nothing"])[-1][:300]
        detail = f"ended with code {done.returncode}: {last_line}"
        return [Check(name, ok=False, detail=detail, remedy=f"Run it by hand: {_by_hand(command)}")]


def _environment() -> dict[str, str]:
    """As ours, and the packages found where this one was: not in the current folder, where another
    project may have an `engine`.
    """
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}


def _by_hand(command: list[str]) -> str:
    return " ".join(["python", *command[1:]])

"""What only a backend's own libraries can tell of a checkpoint, asked before a run in a process of
its own: whoever plans a run loads no torch.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.backends.spec import BackendSpec
from schemas.engine_settings import EngineSettings
from schemas.errors import NightshelfError

log = logging.getLogger("nightshelf.engine")

_LIMIT_S = 300  # libraries on a slow disk take their time
_known: dict[tuple[object, ...], list[dict[str, Any]]] = {}


def problems_apart(spec: BackendSpec, settings: EngineSettings) -> Iterator[NightshelfError]:
    """What `spec.before_a_run` says of these settings; nothing where its packages are not here, or
    it does not answer: the engine says it when it starts.
    """
    if spec.before_a_run is None or settings.model is None or not Path(settings.model).is_dir():
        return
    if next(spec.missing_packages(), None) is not None:
        return
    asked = settings.model_copy(update={"options": {}})
    key = (spec.name, spec.before_a_run, asked.model_dump_json(), *_stamps(settings.model))
    if key not in _known:
        _known[key] = _ask(spec, asked)
    for record in _known[key]:
        yield NightshelfError.of_record(record)


def _ask(spec: BackendSpec, settings: EngineSettings) -> list[dict[str, Any]]:
    assert spec.before_a_run is not None, "asked for by the caller"
    text = settings.model_dump_json()
    if all(package in sys.modules for package in spec.packages):
        return answer(spec.before_a_run, text)
    command = [sys.executable, "-m", "engine.backends.apart", spec.before_a_run]
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env=_environment(),
            check=False,
        )
        found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
        return found
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as err:
        log.warning(
            "the checkpoint was not held against its library before the run; the engine does: %s",
            type(err).__name__,
        )
        return []


def answer(function: str, settings: str) -> list[dict[str, Any]]:
    """The errors that a `module:function` yields for settings in JSON, as records."""
    module, _, name = function.partition(":")
    ask = getattr(importlib.import_module(module), name)
    return [error.as_record() for error in ask(EngineSettings.model_validate_json(settings))]


def _stamps(folder: str) -> list[tuple[str, int, int]]:
    """The files of a checkpoint as they are now."""
    found = []
    for path in sorted(Path(folder).glob("*")):
        if path.suffix in (".json", ".safetensors"):
            stat = path.stat()
            found.append((path.name, stat.st_size, stat.st_mtime_ns))
    return found


def _environment() -> dict[str, str]:
    """As ours, with these packages found where this one was; no GPU is touched, nothing fetched."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **offline, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answer(sys.argv[1], sys.stdin.read())) + "\n")

"""The packages that a backend is made of: whether this Python has them, without importing one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

from schemas.errors import EngineError, quoted

CONTAINER = "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc27"
INSTALL_TRTLLM = (
    f"Run inside NVIDIA's container {CONTAINER} or a later one, or, on Linux with Python 3.12 and "
    "a CUDA GPU, install tensorrt_llm from NVIDIA's package index. See docs/trtllm.md."
)
_PACKAGES = {"torch": ("torch", "transformers", "safetensors"), "trtllm": ("tensorrt_llm",)}


def missing_packages(backend: str) -> Iterator[EngineError]:
    """The error of a backend that lacks one; a backend of somebody else's is theirs to know."""
    for package in _PACKAGES.get(backend, ()):
        try:
            found = package in sys.modules or find_spec(package) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            yield cannot_load(backend, f"ModuleNotFoundError: No module named {package!r}")
            return


def cannot_load(backend: str, why: str) -> EngineError:
    """The error of a backend whose packages are not there, or do not load."""
    if backend == "trtllm":
        return EngineError(
            "backend 'trtllm' needs TensorRT-LLM, which cannot be loaded",
            got=quoted(why),
            do=INSTALL_TRTLLM,
            field="engine.backend",
        )
    return EngineError(
        f"backend {quoted(backend)} cannot be loaded",
        got=why,
        do="Install its packages (pip install 'nightshelf[torch]') or correct engine.backend.",
        field="engine.backend",
    )

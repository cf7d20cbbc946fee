"""Which device this process owns: the only reader of CUDA_VISIBLE_DEVICES; no torch here."""

from __future__ import annotations

import os
import subprocess


def visible_gpus() -> list[str]:
    """Names of the GPUs this process may use, as CUDA_VISIBLE_DEVICES names them.

    Entries of an existing CUDA_VISIBLE_DEVICES are kept as they are: indices, UUIDs or MIG ids.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return out.split()


def num_cpus() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bind_gpu(name: str | None) -> None:
    """Show this process one GPU, or none. Call before torch is imported."""
    os.environ["CUDA_VISIBLE_DEVICES"] = name if name is not None else "-1"

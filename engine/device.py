"""Which device this process owns: the only reader of CUDA_VISIBLE_DEVICES; no torch here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from schemas.errors import EngineError


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


def no_gpu() -> EngineError:
    """The error of a GPU that is asked for and not there."""
    return EngineError(
        "engine.device is cuda but this process sees no CUDA device",
        do="Run on a machine with a GPU, or set engine.device to auto or cpu.",
        field="engine.device",
    )


def num_cpus() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bind_gpu(name: str | None) -> None:
    """Show this process one GPU, or none. Call before torch is imported."""
    os.environ["CUDA_VISIBLE_DEVICES"] = name if name is not None else "-1"


def bind_addresses(addresses: Sequence[str]) -> None:
    """Show this process the GPUs that a cluster assigned to it. Call before torch is imported.

    Raises:
        EngineError: they are not among those it may use, or torch has taken others already.
    """
    names = gpu_names(addresses, os.environ.get("CUDA_VISIBLE_DEVICES"))
    torch = sys.modules.get("torch")
    if names and torch is not None and torch.cuda.is_initialized():
        raise EngineError(
            "CUDA was started in this process before its GPU was known",
            expected="no CUDA in a Python worker before its first shard",
            got=f"GPUs {', '.join(names)} assigned",
        )
    bind_gpu(",".join(names) if names else None)


def gpu_names(addresses: Sequence[str], visible: str | None) -> list[str]:
    """Names of assigned GPUs for CUDA_VISIBLE_DEVICES, given what it holds already.

    An index counts the entries of an existing CUDA_VISIBLE_DEVICES, as CUDA itself and pyspark's
    TorchDistributor count. A UUID (`GPU-…`, `MIG-…`) names itself, and must be one of the entries
    where those are UUIDs; CUDA takes a beginning of a UUID for the whole.

    Args:
        addresses: as the cluster's discovery script found them.
        visible: the variable's value; None where it is not set.

    Raises:
        EngineError: an address leads to no GPU, or two lead to the same.
    """
    if visible is None:
        names = [address.strip() for address in addresses]
    else:
        entries = [name.strip() for name in visible.split(",")]
        if "-1" in entries:  # CUDA stops reading there
            entries = entries[: entries.index("-1")]
        entries = [name for name in entries if name]
        names = [_entry(address.strip(), entries, visible) for address in addresses]
    if len(set(names)) < len(names):
        raise EngineError("two assigned GPU addresses are one GPU", got=", ".join(names))
    return names


def _entry(address: str, entries: list[str], visible: str) -> str:
    """The entry of CUDA_VISIBLE_DEVICES that an address means."""
    if address.isdecimal():
        if int(address) < len(entries):
            return entries[int(address)]
        raise EngineError(
            f"the assigned GPU {address} is not among the visible ones",
            expected=f"an index below {len(entries)}, counting CUDA_VISIBLE_DEVICES",
            got=f"CUDA_VISIBLE_DEVICES={visible}",
            do="Let the discovery script print UUIDs, or leave CUDA_VISIBLE_DEVICES unset.",
        )
    uuids = [name for name in entries if not name.isdecimal()]
    if entries and (
        not uuids or any(address.startswith(name) or name.startswith(address) for name in uuids)
    ):
        return address
    raise EngineError(
        f"the assigned GPU {address} is not among the visible ones",
        expected=f"one of CUDA_VISIBLE_DEVICES={visible}",
        got=address,
    )

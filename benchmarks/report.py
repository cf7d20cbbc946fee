"""What a comparison says: one JSON document for programs, a table for people."""

from __future__ import annotations

import dataclasses
import platform
import resource
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import PromptKind
from benchmarks.contenders import OURS, PEERS, Contender
from benchmarks.play import Played

# Key of `ratios` -> the peer, and which question it is asked.
RATIOS = {
    "score_vs_resend": "resend",
    "score_vs_vllm": "vllm",
    "score_vs_hf_shared": "hf_shared",
    "score_vs_linear": "linear",
    "beam_vs_hf": "hf",
    "beam_vs_vllm": "beams_vllm",
}
KINDS: tuple[PromptKind, ...] = ("history", "soft_token", "long")


def make_report(
    played: list[Played],
    *,
    model: str,
    sizes: dict[str, Any],
    machine: dict[str, Any],
    pipeline: dict[str, Any] | None,
    price_per_hour: float,
    skipped: dict[str, str],
) -> dict[str, Any]:
    """The JSON document. What was not run is null."""
    pipeline = pipeline or {}
    for one in played:
        skipped = skipped | {f"{one.work.case.name}: {k}": v for k, v in one.skipped.items()}
    return {
        "machine": machine,
        "model": model,
        "sizes": sizes,
        "ratios": {key: _first(played, peer) for key, peer in RATIOS.items()},
        "ratios_by_case": {
            one.work.case.name: {c.name: one.ratio(c.name) for c in one.contenders[1:]}
            for one in played
            if len(one.contenders) > 1
        },
        "mfu": {kind: _mfu(_of_kind(played, kind)) for kind in KINDS},
        "mfu_laid_out": {kind: _mfu_laid_out(_of_kind(played, kind)) for kind in KINDS},
        "pipeline_overhead": pipeline.get("overhead"),
        "peak_memory_ratio": pipeline.get("memory_ratio"),
        "pipeline": pipeline,
        "price_per_hour": price_per_hour,
        "cases": [_case(one, price_per_hour) for one in played],
        "not_run": skipped,
        "peak_rss_mib": _peak_rss_mib(),
    }


def _first(played: list[Played], peer: str) -> float | None:
    """The ratio of the first case in which a peer took part: scoring behind 300-token prompts,
    beams behind 64-token ones. All of them are in `ratios_by_case`.
    """
    return next((r for one in played if (r := one.ratio(peer)) is not None), None)


def _mfu(played: list[Played]) -> float | None:
    """Bare matmuls over the engine's passes, of all these cases together."""
    if not played:
        return None
    return sum(p.limit_seconds for p in played) / sum(p.ours.median for p in played)


def _mfu_laid_out(played: list[Played]) -> float | None:
    """The same with the weights of the bare matmuls laid out as the engine's are."""
    limits = [p.stricter_seconds for p in played]
    found = [limit for limit in limits if limit is not None]
    if not found or len(found) < len(limits):
        return None
    return sum(found) / sum(p.ours.median for p in played)


def _of_kind(played: list[Played], kind: PromptKind) -> list[Played]:
    return [p for p in played if p.work.case.prompt == kind]


def _case(one: Played, price_per_hour: float) -> dict[str, Any]:
    case = dataclasses.asdict(one.work.case)
    return case | {
        "label": one.work.case.label,
        "rows_forwarded": one.answer.rows,
        "rows_naive": one.answer.rows_naive,
        "sharing": one.answer.rows_naive / one.answer.rows,
        "mfu": one.limit_seconds / one.ours.median,
        "mfu_laid_out": _mfu_laid_out([one]),
        "gflops_per_s": one.flops["whole"] / one.ours.median / 1e9,
        "limit_gflops_per_s": one.flops["whole"] / one.limit_seconds / 1e9,
        "phases": one.phase_figures(),
        "contenders": [_contender(one, c, price_per_hour) for c in one.contenders],
        "checks": one.checks,
    }


def _contender(one: Played, contender: Contender, price_per_hour: float) -> dict[str, Any]:
    case, ours, seconds = one.work.case, one.ours, contender.seconds
    users_per_s = case.users / contender.median
    per_user = case.candidates if case.task == "score" else case.k
    sampled = contender.sampled
    return {
        "name": contender.name,
        "label": "nightshelf" if contender.name == OURS else PEERS[contender.name],
        "median_s": contender.median,
        "seconds": seconds,
        "spread": max(seconds) / min(seconds),
        "ratio": contender.median / ours.median,
        "ratio_of_best": min(seconds) / min(ours.seconds),
        "rows": contender.rows,
        "sampled": None if sampled is None else f"{sampled[0]} of {sampled[1]}",
        "users_per_s": users_per_s,
        "items_per_s": users_per_s * per_user,
        "cost_per_million_users": cost_per_million(users_per_s, price_per_hour),
    }


def cost_per_million(users_per_s: float, price_per_hour: float) -> float:
    """What a million users cost on this device, in the currency of the price."""
    return price_per_hour / 3600 * 1e6 / users_per_s


def machine_facts(device: torch.device, dtype: str) -> dict[str, Any]:
    """What the figures depend on, besides the sizes."""
    facts = {
        "device": device.type,
        "hardware": _hardware(device),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    if device.type == "cuda":
        facts |= {"cuda": torch.version.cuda, "driver": _driver()}
    return facts


def _hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    return path.read_text(encoding="utf-8").splitlines()[0] if path.is_file() else None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    flags = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in text][:1]
    return " with ".join([names[0] if names else platform.machine(), *flags])


def _peak_rss_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; bytes on macOS
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10

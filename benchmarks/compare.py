"""From the command line to the report: one checkpoint, one backend, all cases."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.cases import Case, Sizes, make_cases
from benchmarks.checkpoint import LEVELS, SHAPES, Checkpoint, make_checkpoint
from benchmarks.contenders import Guests
from benchmarks.ctranslate import load_ctranslate2
from benchmarks.huggingface import load_reference
from benchmarks.limit import matmul_rate, memory_bandwidth
from benchmarks.play import Played, play, say
from benchmarks.report import machine_facts, make_report
from benchmarks.vllm_client import VLLM, PeerError
from benchmarks.workload import make_workload
from engine.backend import Backend
from engine.backends.registry import create_backend
from schemas.settings import EngineSettings

Pipeline = Callable[[argparse.Namespace, Checkpoint], dict[str, Any]]


def compare(args: argparse.Namespace, pipeline: Pipeline | None) -> dict[str, Any]:
    """The report.

    Raises:
        AnswersDiffer: a peer's answer is not ours.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    sizes: Sizes = args.sizes
    cases = [c for c in make_cases(sizes) if fnmatch(c.name, args.only or "*")]
    if not cases:
        names = ", ".join(case.name for case in make_cases(sizes))
        raise SystemExit(f"--only {args.only}: no case has such a name; they are {names}")
    with tempfile.TemporaryDirectory(prefix="nightshelf-bench-") as folder, ExitStack() as stack:
        checkpoint = _checkpoint(args, Path(folder))
        say(checkpoint.label)
        # First, while the machine is ours alone and nothing of it is in memory yet.
        ran = pipeline(args, checkpoint) if pipeline else None
        backend = stack.enter_context(_backend(checkpoint, args.device, args.backend))
        device = backend.facts.device
        skipped = {} if pipeline else {"pipeline": "--no-pipeline"}
        model = load_reference(checkpoint, device)
        guests = _guests(args, cases, checkpoint, device, model, stack, skipped)
        played: list[Played] = []
        for case in cases:
            work = make_workload(case, checkpoint, args.device, args.seed)
            one = play(work, backend, guests, sample=sizes.sample, repeats=sizes.repeats)
            played.append(one)
        machine = machine_facts(device, args.dtype) | {
            "backend": args.backend,
            "matmul_gflops_per_s": matmul_rate(getattr(torch, args.dtype), device),
            "memory_gb_per_s": memory_bandwidth(device),
        }
        if guests.vllm is not None:
            machine["vllm"] = guests.vllm.facts
        if device.type == "cuda":
            machine["peak_device_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
    return make_report(
        played,
        model=checkpoint.label,
        sizes=dataclasses.asdict(sizes) | {"quick": args.quick, "seed": args.seed},
        machine=machine,
        pipeline=ran,
        price_per_hour=args.price_per_hour,
        skipped=skipped,
    )


def _checkpoint(args: argparse.Namespace, folder: Path) -> Checkpoint:
    layers = min(args.sizes.layers, SHAPES[args.model].layers)
    return make_checkpoint(
        folder,
        name=args.model,
        layers=layers,
        codes=args.sizes.codes,
        dtype=args.dtype,
        seed=args.seed,
    )


@contextlib.contextmanager
def _backend(checkpoint: Checkpoint, device: str, name: str) -> Iterator[Backend]:
    settings = EngineSettings.model_validate(
        {
            "backend": name,
            "model": checkpoint.folder,
            "dtype": checkpoint.dtype,
            "device": device,
        }
    )
    backend = create_backend(settings)
    try:
        yield backend
    finally:
        backend.close()


def _guests(
    args: argparse.Namespace,
    cases: list[Case],
    checkpoint: Checkpoint,
    device: torch.device,
    model: PreTrainedModel,
    stack: ExitStack,
    skipped: dict[str, str],
) -> Guests:
    """The peers that can be loaded and that some case asks for; why not, in `skipped`."""
    wanted = {peer for case in cases for peer in case.peers}
    vllm, translator = None, None
    if wanted & {"vllm", "vllm_cached", "beams_vllm"}:
        try:
            if not args.vllm:
                raise PeerError("--vllm was not given")
            asking = [case for case in cases if case.peers]
            vllm = stack.enter_context(
                VLLM(
                    checkpoint,
                    max_tokens=max(case.tokens[1] for case in asking) + LEVELS + 1,
                    max_width=max(case.width for case in asking),
                    device=device.type,
                )
            )
            say(f"vLLM: {vllm.facts}")
        except PeerError as err:
            skipped["vLLM"] = str(err)
    if "ctranslate2" in wanted:
        try:
            translator = load_ctranslate2(checkpoint, device.type)
        except PeerError as err:
            skipped["CTranslate2"] = str(err)
    return Guests(model=model, vllm=vllm, ctranslate2=translator)

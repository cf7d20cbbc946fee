"""What `nightshelf doctor --backend trtllm` looks at: the library, the device, and, with a model,
whether the engines tell the truth and how fast they are.

Every check is made even where an earlier one failed, as far as it can be; nothing here raises.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from engine.backend import NodeBatch, Norm, PackedPrompts, Targets, TokenColumns
from engine.backends.trtllm.backend import TrtllmBackend
from engine.backends.trtllm.library import Library, load_library
from engine.backends.trtllm.self_test import (
    TOLERANCE,
    largest_difference,
    one_prompt,
    probe_tokens,
)
from engine.backends.trtllm.spec import INSTALL
from schemas.checks import Check
from schemas.errors import NightshelfError
from schemas.settings import EngineSettings, Precision

_PARTNERS = ("torch", "transformers", "flashinfer-python")
_DEVICE = "Run on a machine with an NVIDIA GPU and its driver; in a container, with --gpus all."
PROBE_USERS, PROBE_TOKENS, PROBE_ITEMS = 16, 128, 64  # of the throughput


def checkup(model: str | None, *, dtype: Precision = "bfloat16") -> list[Check]:
    """Checks of this machine, and of a checkpoint folder on it, in the order they were made."""
    checks: list[Check] = []
    library = _library(checks)
    _versions(checks)
    _device(checks)
    if library is None:
        return checks
    if model is None:
        checks.append(Check("model", True, "none given: the engines were not started"))
        return checks
    settings = EngineSettings(backend="trtllm", model=model, dtype=dtype)
    backend = _started(checks, library, settings)
    if backend is None:
        return checks
    try:
        _try(checks, "scores of transformers", lambda: _reference(backend, model))
        _try(checks, "multi-item scoring", lambda: _multi_item(backend))
        _try(checks, "two users, one prompt", lambda: _two_users(backend, native=False))
        _try(checks, "throughput", lambda: _throughput(backend))
        _try(checks, "native beams", lambda: _beams(backend))
        _try(checks, "two users, native beams", lambda: _two_users(backend, native=True))
    finally:
        backend.close()
    return checks


def _library(checks: list[Check]) -> Library | None:
    try:
        library = load_library()
    except NightshelfError as err:
        checks.append(Check("TensorRT-LLM", False, err.got or err.what, INSTALL))
        return None
    checks.append(Check("TensorRT-LLM", True, f"version {library.version}, can encode"))
    return library


def _versions(checks: list[Check]) -> None:
    found = []
    for package in _PARTNERS:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} missing")
    ok = "missing" not in found[0]
    checks.append(Check("packages", ok, ", ".join(found), "" if ok else INSTALL))


def _device(checks: list[Check]) -> None:
    if not torch.cuda.is_available():
        detail = f"torch {torch.__version__} sees no CUDA device"
        checks.append(Check("GPU", False, detail, _DEVICE))
        return
    properties = torch.cuda.get_device_properties(0)
    detail = (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
        f"compute capability {properties.major}.{properties.minor}"
    )
    ok = properties.major >= 8
    checks.append(Check("GPU", ok, detail, "" if ok else "Its kernels need Ampere or later."))


def _started(
    checks: list[Check], library: Library, settings: EngineSettings
) -> TrtllmBackend | None:
    try:
        backend = TrtllmBackend(library, settings)
    except (NightshelfError, torch.OutOfMemoryError) as err:
        do = getattr(err, "do", None) or "See the engine's own log."
        checks.append(Check("encode engine", False, str(err), do))
        return None
    facts = backend.facts
    detail = f"{facts.dtype}, vocabulary {facts.vocab_size}, positions {facts.max_positions}"
    checks.append(Check("encode engine", True, detail))
    return backend


def _try(checks: list[Check], name: str, look: Callable[[], Check]) -> None:
    try:
        found = look()
        remedy = "" if found.ok else found.remedy
        checks.append(dataclasses.replace(found, name=name, remedy=remedy))
    except Exception as err:  # a check that breaks is a check that failed
        detail = f"{type(err).__name__}: {err}"
        checks.append(Check(name, False, detail, "See docs/trtllm.md, known versions."))


def _reference(backend: TrtllmBackend, model: str) -> Check:
    """A probe read by the engine and by transformers, on the CPU."""
    if backend.facts.dtype not in ("float32", "bfloat16"):
        return Check("", True, f"not compared: the checkpoint is {backend.facts.dtype}")
    prefix, items = probe_tokens(backend.facts.vocab_size)
    tokens = np.concatenate([prefix, *items])
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model,
        dtype=torch.bfloat16 if backend.facts.dtype == "bfloat16" else torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    with torch.inference_mode():
        logits = loaded.eval()(input_ids=torch.from_numpy(tokens)[None]).logits[0]
    want = torch.log_softmax(logits.float(), dim=-1)
    difference = largest_difference(backend.probe(tokens).cpu(), want)
    detail = f"differ by {difference:.3g} nats at most"
    limit = 2 * TOLERANCE[backend.facts.dtype]
    return Check("", difference <= limit, detail, f"More than {limit:g} is another model.")


def _multi_item(backend: TrtllmBackend) -> Check:
    if backend.uses_multi_item:
        return Check("", True, "two items behind one prompt read as two prompts do")
    remedy = "Scores are right all the same, and slower; use a version that docs/trtllm.md names."
    return Check("", False, f"not in use: {backend.refused}", remedy)


def _two_users(backend: TrtllmBackend, *, native: bool) -> Check:
    """The same tokens with two vectors: each reads as it does alone, and the two differently."""
    if not (backend.beams_take_vectors if native else backend.takes_vectors):
        return Check("", True, "this checkpoint takes no user vectors here")
    vectors = torch.randn(2, backend.facts.hidden_size, generator=torch.Generator().manual_seed(0))
    vectors = vectors.to(backend.facts.device) * 0.1
    look = _beam_scores if native else _end_scores
    both = look(backend, vectors)
    alone = np.concatenate([look(backend, vectors[i : i + 1]) for i in (1, 0)])[::-1]
    apart = float(np.abs(both[0] - both[1]).max())
    moved = float(np.abs(both - alone).max())
    detail = f"users differ by {apart:.3g} nats, company changes {moved:.3g}"
    return Check("", apart > max(3 * moved, 1e-3), detail, "Do not use user vectors here.")


def _end_scores(backend: TrtllmBackend, vectors: torch.Tensor) -> np.ndarray:
    """log p of some tokens behind each user's prompt `[users, tokens]`."""
    packed = _same_prompt(backend.facts.vocab_size, vectors)
    some = np.unique(np.linspace(0, backend.facts.vocab_size - 1, 64, dtype=np.int64))
    device, num = backend.facts.device, len(vectors)
    targets = Targets(
        row=torch.arange(num, device=device).repeat_interleave(len(some)),
        column=torch.arange(len(some), device=device).repeat(num),
        columns=TokenColumns(some),
    )
    context = backend.prefill(packed, 0)
    rows = torch.arange(num, device=device)
    found = backend.log_probs(context, rows, targets, Norm("full_vocab"))
    return found.view(num, len(some)).float().cpu().numpy()


def _beam_scores(backend: TrtllmBackend, vectors: torch.Tensor) -> np.ndarray:
    """Scores of each user's beams, best first `[users, beams]`."""
    found = backend.native_beams(
        backend.prefill(_same_prompt(backend.facts.vocab_size, vectors), 0)
    )
    return -np.sort(-np.nan_to_num(found.score, nan=-1e9), axis=1)


def _same_prompt(vocab_size: int, vectors: torch.Tensor) -> PackedPrompts:
    """One prompt for every vector, which stands in its middle."""
    tokens, _ = probe_tokens(vocab_size)
    num, length = len(vectors), len(tokens)
    return PackedPrompts(
        token_ids=np.tile(tokens, num),
        offsets=np.arange(num + 1, dtype=np.int64) * length,
        static_prefix=np.empty(0, dtype=np.int64),
        soft_positions=np.arange(num, dtype=np.int64) * length + length // 2,
        soft_vectors=vectors,
    )


def _beams(backend: TrtllmBackend) -> Check:
    backend.start_beams(width=4, steps=3, prompt_tokens=64)
    tokens, _ = probe_tokens(backend.facts.vocab_size)
    found = backend.native_beams(backend.prefill(one_prompt(tokens), 0))
    whole = int((found.length[0] == 3).sum())
    detail = f"{whole} of 4 beams came back whole, the best with the score of its tokens"
    return Check("", whole > 0, detail, "Use task.generate.mode: constrained.")


def _throughput(backend: TrtllmBackend) -> Check:
    """Tokens of prompts and items per second, on work that is small but packed."""
    facts, rng = backend.facts, np.random.default_rng(0)
    length = min(PROBE_TOKENS, facts.max_positions - 2)
    prompts = PackedPrompts(
        token_ids=rng.integers(0, facts.vocab_size, PROBE_USERS * length),
        offsets=np.arange(PROBE_USERS + 1, dtype=np.int64) * length,
        static_prefix=np.empty(0, dtype=np.int64),
        soft_positions=np.empty(0, dtype=np.int64),
        soft_vectors=None,
    )
    num = PROBE_USERS * PROBE_ITEMS
    prompt = torch.arange(num, device=facts.device) // PROBE_ITEMS
    nodes = NodeBatch(
        prompt=prompt,
        parent=prompt,
        token=torch.from_numpy(rng.integers(0, facts.vocab_size, num)).to(facts.device),
        depth=torch.ones_like(prompt),
        slot=torch.arange(num, device=facts.device) % PROBE_ITEMS,
        num_slots=PROBE_ITEMS,
        max_depth=1,
    )
    targets = Targets(
        row=torch.arange(num, device=facts.device),
        column=torch.zeros(num, dtype=torch.int64, device=facts.device),
        columns=TokenColumns(np.asarray([0], dtype=np.int64)),
    )
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        context = backend.prefill(prompts, num)
        backend.extend(context, nodes)
        rows = torch.arange(PROBE_USERS, PROBE_USERS + num, device=facts.device)
        backend.log_probs(context, rows, targets, Norm("full_vocab")).sum().item()
        seconds.append(time.perf_counter() - started)
    rate = (PROBE_USERS * length + num) / min(seconds)
    users = PROBE_USERS / min(seconds)
    return Check("", True, f"{rate:,.0f} tokens/s, {users:,.1f} users/s of {PROBE_ITEMS} items")


def main() -> int:
    """`python -m engine.backends.trtllm.checks [MODEL]`: a line per check; 1 when one failed."""
    checks = checkup(sys.argv[1] if len(sys.argv) > 1 else None)
    for check in checks:
        words = f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}"
        sys.stdout.write(words + (f". {check.remedy}" if check.remedy else "") + "\n")
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())

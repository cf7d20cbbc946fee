"""Does scoring work on this machine? A tiny run of the engine against a plain reading of the model.

    python -m engine.self_test --backend NAME

prints one JSON list of checks. `nightshelf doctor` runs it in a process of its own, so that a
library that crashes, or hangs, takes nothing else with it.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.backends.fake.backend import fake_log_prob
from engine.backends.registry import available, create_backend, spec_of
from engine.device import visible_gpus
from engine.engine import open_engine
from engine.prompts.tokenizer import bind_space, load_tokenizer
from engine.trees.sid_trie import SidTrie, build_trie
from schemas.checks import Check
from schemas.engine_settings import DEFAULT_BACKEND
from schemas.errors import NightshelfError
from schemas.requests import CandidateSets, Ragged, UserBatch
from schemas.settings import RunConfig

TOLERANCE = 1e-5  # nats, between the engine and a plain forward, float32
_CUDA_TOLERANCE = 1e-4  # kernels of other shapes add in another order
_BF16_TOLERANCE = 2e-2  # relative, of a matmul against float32
_SIZES, _ITEMS = (4, 3, 5), 12
_TOKENS = ("<a_{code}>", "<b_{code}>", "<c_{code}>")
_REPORT = "Report it with this output; the numbers of a run here would be wrong."


def check_fake() -> Check:
    """The algorithms over the fake backend, whose scores can be worked out by hand."""
    name = "self-test, fake backend"
    config = _config({"backend": "fake"})
    trie, users = _work()
    scores, prompts = _score(config, trie, users)
    tokens = _item_tokens(config, trie)
    wanted = [
        sum(
            fake_log_prob(np.asarray(prompt, "<i8").tobytes(), item[:at], item[at])
            for at in range(len(item))
        )
        for prompt in prompts
        for item in tokens
    ]
    return _compare(name, scores, np.asarray(wanted), TOLERANCE)


def check_tiny_model(backend: str, device: str) -> Check:
    """A tiny random model: the engine against one full forward per user and item."""
    name = f"self-test, {backend} backend"
    with tempfile.TemporaryDirectory(prefix="nightshelf-doctor-") as folder:
        _save_tiny_model(Path(folder))
        config = _config({"backend": backend, "model": folder, "device": device})
        trie, users = _work()
        scores, prompts = _score(config, trie, users)
        wanted = _plain_scores(folder, prompts, _item_tokens(config, trie), device)
    cuda = device != "cpu" and torch.cuda.is_available()
    return _compare(name, scores, wanted, _CUDA_TOLERANCE if cuda else TOLERANCE)


def check_devices() -> list[Check]:
    """What torch sees, and whether it can multiply in the precisions that runs use."""
    cuda = torch.cuda.is_available()
    checks = [_torch_device(cuda)]
    device = torch.device("cuda" if cuda else "cpu")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator).to(device) for _ in range(2))
    want = a @ b
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        try:
            got = (a.to(dtype) @ b.to(dtype)).float()
            error = float((got - want).norm() / want.norm())
        except RuntimeError as err:
            checks.append(Check(f"{name} matmul", ok=False, detail=str(err), remedy=_OTHER_DTYPE))
            continue
        ok = error <= _BF16_TOLERANCE
        detail = f"relative error {error:.1e} on {device.type}"
        checks.append(Check(f"{name} matmul", ok, detail, "" if ok else _OTHER_DTYPE))
    return checks


_OTHER_DTYPE = "Set engine.dtype to the other one, or install a torch build for this machine."


def _torch_device(cuda: bool) -> Check:
    if not cuda:
        built = torch.version.cuda or "no CUDA"
        detail = f"cpu, {torch.get_num_threads()} threads (torch is built for {built})"
        gpus = visible_gpus()
        if not gpus:
            return Check("torch device", ok=True, detail=detail)
        remedy = "Install the torch build for this machine's driver (see pytorch.org), or set "
        remedy += "CUDA_VISIBLE_DEVICES= to run on the CPU on purpose."
        detail += f"; the driver shows {len(gpus)} GPUs"
        return Check("torch device", ok=False, detail=detail, remedy=remedy)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("torch device", ok=True, detail=f"cuda: {', '.join(names)}")


def check_model(backend: str, folder: str, device: str, dtype: str) -> Check:
    """Load the user's own model; as it starts, it is compared with its library's forward."""
    settings = {"backend": backend, "model": folder, "device": device, "dtype": dtype}
    started = create_backend(_config(settings).engine)
    facts = started.facts
    detail = f"{facts.dtype} on {facts.device}, {facts.vocab_size:,} tokens"
    detail += f"; {facts.code_path}" if facts.code_path else ""
    started.close()
    return Check("model loads and scores as its library does", ok=True, detail=detail)


# --- the work: two users, twelve items ------------------------------------------------------------


def _config(engine: dict[str, Any]) -> RunConfig:
    raw = {
        "surface": "doctor",
        "engine": engine,
        "sid": {"sizes": _SIZES, "tokens": _TOKENS},
        "prompt": {"template": "{history}", "max_tokens": 32},
        "inputs": {"users": "-", "catalog": "-", "candidates": "-"},
        "task": {"k": 5, "score": {}},
        "output": {"path": "-"},
    }
    return RunConfig.model_validate(raw)


def _work() -> tuple[SidTrie, UserBatch]:
    rng = np.random.default_rng(0)
    codes = np.stack([rng.integers(0, size, _ITEMS) for size in _SIZES], axis=1)
    every = list(range(_ITEMS))
    users = UserBatch(
        num_users=2,
        history=Ragged.from_lists([[0, 5, 3], [7]]),
        candidates=CandidateSets.own(Ragged.from_lists([every, every])),
    )
    return build_trie(codes.astype(np.int32)), users


def _score(
    config: RunConfig, trie: SidTrie, users: UserBatch
) -> tuple[NDArray[np.float64], list[list[int]]]:
    """Scores of all candidates, user after user; and the prompts."""
    with open_engine(config, trie) as engine:
        prepared = engine.prepare(users)
        scores = np.zeros((users.num_users, _ITEMS))
        for pack in prepared.packs:
            scored = engine.run(prepared, pack).scored
            assert scored is not None, "the task scores"
            scores[pack[scored.user], scored.item] = scored.score
        prompts = [prepared.prompts.tokens.row(u).tolist() for u in range(users.num_users)]
    return scores.reshape(-1), prompts


def _item_tokens(config: RunConfig, trie: SidTrie) -> list[list[int]]:
    bound = bind_space(config, load_tokenizer(config))
    codes = trie.codes_of_sid[trie.sid_of_item].astype(np.int64)
    return [[int(bound.token_ids[level][c]) for level, c in enumerate(row)] for row in codes]


def _compare(
    name: str, scores: NDArray[np.float64], wanted: NDArray[np.float64], tolerance: float
) -> Check:
    worst = float(np.abs(scores - wanted).max())
    ok = worst <= tolerance  # NaN is not
    detail = f"{len(scores)} scores, largest difference {worst:.1e} nats"
    return Check(name, ok, detail, "" if ok else f"At most {tolerance:g} is right. {_REPORT}")


# --- the tiny model -------------------------------------------------------------------------------


def _save_tiny_model(folder: Path) -> None:
    """A random Qwen3 of two layers, with a tokenizer that has the SID tokens."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokens = [
        pattern.replace("{code}", str(code))
        for pattern, size in zip(_TOKENS, _SIZES, strict=True)
        for code in range(size)
    ]
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokens) + 4,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # larger than the default, so that scores differ clearly
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(4)}, unk_token="w0"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))


@torch.inference_mode()
def _plain_scores(
    folder: str, prompts: list[list[int]], items: list[list[int]], device: str
) -> NDArray[np.float64]:
    """One full forward of the library's own model per user and item; no cache, no tree."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    where = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    model.eval().to(where)
    out = []
    for prompt in prompts:
        for item in items:
            logits = model(torch.tensor([prompt + item], device=where), use_cache=False).logits[0]
            log_p = torch.log_softmax(logits.double(), dim=-1)
            out.append(sum(float(log_p[len(prompt) - 1 + at, t]) for at, t in enumerate(item)))
    return np.asarray(out)


# --- the command ----------------------------------------------------------------------------------


def run_checks(backend: str, model: str | None, device: str, dtype: str) -> Iterator[Check]:
    """The checks of one backend; whatever goes wrong is a check that failed."""
    spec = spec_of(backend)
    wanted: list[tuple[str, Any]] = [("self-test, fake backend", lambda: [check_fake()])]
    if spec.checks is not None:
        own = pkgutil.resolve_name(spec.checks)
        wanted.append((backend, lambda: own(model)))
    elif spec.reads_checkpoint:
        name = f"self-test, {backend} backend"
        wanted.insert(0, ("torch device", check_devices))
        wanted.append((name, lambda: [check_tiny_model(backend, device)]))
        if model is not None:
            wanted.append(("model", lambda: [check_model(backend, model, device, dtype)]))
    for name, check in wanted:
        try:
            yield from check()
        except NightshelfError as err:
            yield Check(name, ok=False, detail=str(err), remedy=err.do or "Correct the model.")
        except Exception as err:  # of any library below: doctor exists to say it in words
            yield Check(name, ok=False, detail=f"{type(err).__name__}: {err}", remedy=_REINSTALL)


_REINSTALL = "Install the versions that were tested: pip install -c constraints.txt -e '.[torch]'."


def main() -> None:
    """Print the checks as JSON."""
    parser = argparse.ArgumentParser(prog="python -m engine.self_test")
    parser.add_argument("--backend", default=DEFAULT_BACKEND, choices=available())
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    checks = run_checks(args.backend, args.model, args.device, args.dtype)
    sys.stdout.write(json.dumps([asdict(check) for check in checks]) + "\n")


if __name__ == "__main__":
    main()

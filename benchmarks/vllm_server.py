"""vLLM on the same work, in its own environment: JSON lines in on stdin, JSON lines out on stdout.

Runs with the Python of `.venv-vllm` (`make bench-vllm`) and imports nothing of ours. Requests:

    {"op": "load", "model": folder, "dtype": …, "max_tokens": …, "max_width": …}
    {"op": "score", "prompts": [[id]], "items": [[[id]]], "read_cache": bool, "answer": bool}
    {"op": "beams", "prompts": [[id]], "width": W, "length": L, "answer": bool}

The reply holds `seconds` of the call itself, and with `answer` what it found; `error` if it failed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any


def load(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The engine; vLLM's version, device and threads, and the tokens of a block of its cache."""
    vllm: Any = importlib.import_module("vllm")

    platform = importlib.import_module("vllm.platforms").current_platform.device_type
    # On a GPU the engine that it is compared with is on the same one.
    share = {} if platform == "cpu" else {"gpu_memory_utilization": 0.4}
    engine = vllm.LLM(
        **share,
        model=request["model"],
        dtype=request["dtype"],
        max_model_len=request["max_tokens"],
        max_logprobs=2 * request["max_width"],
        enable_prefix_caching=True,
        generation_config="vllm",
        seed=0,
        disable_log_stats=True,
    )
    block = engine.llm_engine.vllm_config.cache_config.block_size
    threads = importlib.import_module("torch").get_num_threads()
    return engine, {
        "version": vllm.__version__,
        "device": platform,
        "threads": threads,
        "block_tokens": block,
    }


def score(engine: Any, request: dict[str, Any]) -> list[list[float]]:
    """Sum of the log-probabilities of each item's tokens behind its user's prompt.

    With `read_cache` the prompts' cached blocks are read (see `fill_cache`). vLLM does not do that
    of itself here, as the log-probabilities of cached tokens are missing; those of the items are
    there unless the prompt ends with a block.
    """
    params_of: Any = importlib.import_module("vllm").SamplingParams

    params = params_of(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,  # of the token itself and no others
        detokenize=False,
        skip_reading_prefix_cache=False if request["read_cache"] else None,
    )
    prompts = [
        {"prompt_token_ids": prompt + item}
        for prompt, items in zip(request["prompts"], request["items"], strict=True)
        for item in items
    ]
    outputs = iter(engine.generate(prompts, params, use_tqdm=False))
    return [
        [_score_of(next(outputs), len(prompt), item) for item in items]
        for prompt, items in zip(request["prompts"], request["items"], strict=True)
    ]


def _score_of(output: Any, start: int, item: list[int]) -> float:
    found = output.prompt_logprobs
    return sum(float(found[start + i][token].logprob) for i, token in enumerate(item))


def fill_cache(engine: Any, prompts: list[list[int]]) -> None:
    """Put the prompts' KV into the prefix cache, so that a call that reads it prefills nothing."""
    params_of: Any = importlib.import_module("vllm").SamplingParams
    once = [{"prompt_token_ids": prompt} for prompt in prompts]
    engine.generate(once, params_of(max_tokens=1, temperature=0.0), use_tqdm=False)


def beams(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The best sequences of each user: tokens `[U, W, L]` and their summed log-probabilities."""
    params_of: Any = importlib.import_module("vllm.sampling_params").BeamSearchParams

    params = params_of(
        beam_width=request["width"],
        max_tokens=request["length"],
        ignore_eos=True,
        length_penalty=0.0,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    found = engine.generate.search(prompts, params)
    length = request["length"]
    return {
        "tokens": [[s.tokens[-length:] for s in one.sequences] for one in found],
        "scores": [[s.cum_logprob for s in one.sequences] for one in found],
    }


def main() -> None:
    """Answer requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")  # what the libraries print goes to stderr
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any] = {}
        try:
            if request["op"] == "load":
                engine, reply = load(request)
            else:
                call = {"score": score, "beams": beams}[request["op"]]
                engine.reset_prefix_cache()  # a turn is not to profit from the one before
                if request.get("read_cache"):
                    fill_cache(engine, request["prompts"])
                start = time.perf_counter()
                found = call(engine, request)
                reply["seconds"] = time.perf_counter() - start
                if request["answer"]:
                    reply["found"] = found
        except Exception as err:  # told to whoever asked, who decides
            reply = {"error": f"{type(err).__name__}: {err}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()

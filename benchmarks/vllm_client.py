"""The other end of `vllm_server.py`: starts it, loads the checkpoint once, asks it turn by turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.checkpoint import LEVELS, Checkpoint
from benchmarks.workload import Workload
from schemas.requests import Ints

_SETTLE_S = 0.5  # its OpenMP threads spin for 0.2 s after their last work, on our cores
ENVIRONMENT = Path(".venv-vllm")  # made by `make bench-vllm`, in the root of the checkout
_ROOT = Path(__file__).resolve().parents[1]


class PeerError(Exception):
    """A peer cannot be run, and why."""


class VLLM:
    """A vLLM process with the checkpoint loaded. A context manager: the process ends with it."""

    def __init__(
        self, checkpoint: Checkpoint, *, max_tokens: int, max_width: int, device: str = "cpu"
    ) -> None:
        python = _ROOT / ENVIRONMENT / "bin" / "python"
        if not python.is_file():
            raise PeerError(f"{ENVIRONMENT} is not there: make bench-vllm")
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in its own process: starts in seconds
            "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name("vllm_server.py")],
            env=os.environ | settings,
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("NIGHTSHELF_BENCH_DEBUG") else subprocess.DEVNULL,
            text=True,
        )
        self.facts = self.ask(  # version, device, threads, block_tokens
            op="load",
            model=checkpoint.folder,
            dtype=checkpoint.dtype,
            max_tokens=max_tokens,
            max_width=max_width,
        )
        if self.facts["device"] != device:
            self._end()
            raise PeerError(f"its build is for {self.facts['device']}, we are on {device}")

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, one reply; `PeerError` when it failed."""
        assert self._process.stdin, "a pipe"
        assert self._process.stdout, "a pipe"
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError as err:
            raise PeerError(f"vLLM ended: {err}") from err
        if not line:
            raise PeerError("vLLM ended; NIGHTSHELF_BENCH_DEBUG=1 shows what it printed")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(f"vLLM: {reply['error']}")
        time.sleep(_SETTLE_S)
        return reply

    def __enter__(self) -> VLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._end()
        print("vLLM ended", file=sys.stderr)

    def _end(self) -> None:
        self._process.stdin.close() if self._process.stdin else None
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class VLLMWork:
    """A workload as vLLM is asked about it. The first `sample` candidates of a user are scored."""

    def __init__(self, server: VLLM, work: Workload, sample: int = 0) -> None:
        self._server = server
        self._work = work
        self._prompts = [prompt.tolist() for prompt in work.prompt_tokens]
        self._items = work.candidate_tokens[:, :sample].tolist()

    def score(self, *, read_cache: bool) -> NDArray[np.float32]:
        """Scores `[U, sample]`; `PeerError` where reading the cache would lose some of them."""
        block = self._server.facts["block_tokens"]
        if read_cache and any(len(prompt) % block == 0 for prompt in self._prompts):
            raise PeerError(f"a prompt ends with a block of {block} tokens")
        found = self._ask_score(read_cache, answer=True)["found"]
        return np.asarray(found, dtype=np.float32)

    def time_score(self, *, read_cache: bool) -> float:
        """Seconds of a turn, inside vLLM's process."""
        return float(self._ask_score(read_cache, answer=False)["seconds"])

    def beams(self) -> tuple[Ints, NDArray[np.float32]]:
        """Sequences over the whole vocabulary `[U, W, 3]` and their scores `[U, W]`."""
        found = self._ask_beams(answer=True)["found"]
        tokens = np.asarray(found["tokens"], dtype=np.int64)
        return tokens, np.asarray(found["scores"], dtype=np.float32)

    def time_beams(self) -> float:
        """Seconds of a turn, inside vLLM's process."""
        return float(self._ask_beams(answer=False)["seconds"])

    def _ask_score(self, read_cache: bool, *, answer: bool) -> dict[str, Any]:
        return self._server.ask(
            op="score", prompts=self._prompts, items=self._items, read_cache=read_cache,
            answer=answer,
        )  # fmt: skip

    def _ask_beams(self, *, answer: bool) -> dict[str, Any]:
        return self._server.ask(
            op="beams", prompts=self._prompts, width=self._work.case.width, length=LEVELS,
            answer=answer,
        )  # fmt: skip

"""CTranslate2's beam search: float32 on a CPU only, and over the whole vocabulary.

It knows no trie, so that its beams are other sequences than ours; they are as many and as long.
Optional: `pip install ctranslate2` into the environment of the benchmarks.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.checkpoint import LEVELS, Checkpoint
from benchmarks.vllm_client import PeerError
from benchmarks.workload import Workload
from schemas.requests import Ints


def load_ctranslate2(checkpoint: Checkpoint, device: str) -> Any:
    """Convert the checkpoint and load it; `PeerError` where it cannot be."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise PeerError("ctranslate2 is not installed")
    if checkpoint.dtype != "float32" or device != "cpu":
        raise PeerError("ctranslate2 has no bfloat16 on a CPU: --dtype float32 --device cpu")
    ctranslate2: Any = importlib.import_module("ctranslate2")
    converters: Any = importlib.import_module("ctranslate2.converters")

    folder = Path(checkpoint.folder).with_name("ctranslate2")
    try:
        if not folder.is_dir():
            converters.TransformersConverter(checkpoint.folder).convert(str(folder))
        return ctranslate2.Generator(
            str(folder),
            device="cpu",
            compute_type="float32",
            inter_threads=1,
            intra_threads=torch.get_num_threads(),
        )
    except (ValueError, RuntimeError, KeyError, AttributeError, OSError) as err:
        raise PeerError(f"ctranslate2 cannot load the model: {type(err).__name__}: {err}") from err


class CTranslate2:
    """A workload as CTranslate2 is asked about it."""

    def __init__(self, generator: Any, work: Workload) -> None:
        self._generator = generator
        self._width = work.case.width
        texts = work.checkpoint.tokens
        self._prompts = [[texts[i] for i in prompt.tolist()] for prompt in work.prompt_tokens]

    def beams(self) -> tuple[Ints, NDArray[np.float32]]:
        """Sequences over the whole vocabulary `[U, W, 3]` and their scores `[U, W]`."""
        found = self._generator.generate_batch(
            self._prompts,
            beam_size=self._width,
            num_hypotheses=self._width,
            max_length=LEVELS,
            length_penalty=0.0,
            return_scores=True,
            include_prompt_in_result=False,
            end_token=[],
        )
        tokens = np.asarray([one.sequences_ids for one in found], dtype=np.int64)
        return tokens, np.asarray([one.scores for one in found], dtype=np.float32)

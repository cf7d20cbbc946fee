"""A deterministic backend without a model: log-probabilities from a hash of (seed, prompt, path,
token).

It runs the real algorithms over the real primitive, so a whole pipeline can be tried in
milliseconds and every score checked by hand (`fake_log_prob`). Its numbers are a sub-distribution:
each log-probability is <= 0 and the probabilities of a softmax set sum to at most 1; under `trie`
they sum to exactly 1.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import xxhash
from torch import Tensor

from engine.backend import BackendFacts, NodeBatch, Norm, PackedPrompts, Targets
from engine.backends.fake.spec import EMBEDDING_WIDTH
from engine.score_norms import log_softmax_of_targets
from schemas.settings import EngineSettings, Pooling

_VOCAB = 1 << 20
_MASK = (1 << 64) - 1


class FakeContext:
    """Keys of prompts and nodes: the hash of everything a row has seen."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys  # [rows] int64
        self._num_prompts = len(keys)

    @property
    def num_prompts(self) -> int:
        """B."""
        return self._num_prompts

    @property
    def num_rows(self) -> int:
        """B + nodes."""
        return len(self.keys)

    def rewind(self, num_rows: int) -> None:
        """Forget the nodes from row `num_rows` on."""
        self.keys = self.keys[:num_rows]


class FakeBackend:
    """See the module."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._facts = BackendFacts(
            name="fake",
            vocab_size=_VOCAB,
            hidden_size=0,
            embedding_width=EMBEDDING_WIDTH,
            max_positions=1 << 30,
            dtype="float32",
            device=torch.device("cpu"),
        )

    @property
    def facts(self) -> BackendFacts:
        """Sizes, precision and device."""
        return self._facts

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> FakeContext:
        """Hash each prompt: its tokens, and the soft vectors where they stand."""
        prefix = prompts.static_prefix.tobytes()
        soft = b"" if prompts.soft_vectors is None else prompts.soft_vectors.numpy().tobytes()
        size = len(soft) // max(len(prompts.soft_positions), 1)
        first = np.searchsorted(prompts.soft_positions, prompts.offsets)
        keys = []
        for p in range(prompts.num_prompts):
            tokens = prompts.token_ids[prompts.offsets[p] : prompts.offsets[p + 1]].tobytes()
            vectors = soft[first[p] * size : first[p + 1] * size]
            places = prompts.soft_positions[first[p] : first[p + 1]] - prompts.offsets[p]
            seen = prefix + tokens + (places.tobytes() + vectors if vectors else b"")
            keys.append(xxhash.xxh64_intdigest(seen, seed=self._seed))
        return FakeContext(torch.from_numpy(np.asarray(keys, dtype=np.uint64).view(np.int64)))

    def extend(self, context: FakeContext, nodes: NodeBatch) -> None:
        """Append the nodes' keys, shallow ones first because deeper ones build on them."""
        begin = context.num_rows
        context.keys = torch.cat([context.keys, torch.zeros(len(nodes.token), dtype=torch.int64)])
        for depth in range(1, nodes.max_depth + 1):
            here = torch.nonzero(nodes.depth == depth).squeeze(1)
            parent = context.keys[nodes.parent[here]]
            context.keys[begin + here] = _mix(parent, nodes.token[here])

    def log_probs(self, context: FakeContext, rows: Tensor, targets: Targets, norm: Norm) -> Tensor:
        """log u - log(size of the softmax set), u in (0, 1) from the hash of (row, token)."""
        tokens = torch.from_numpy(targets.columns.token_ids)[targets.column]
        logits = _log_uniform(_mix(context.keys[rows[targets.row]], tokens))
        if norm.kind == "trie":
            return log_softmax_of_targets(logits.float(), targets, len(rows))
        size = _VOCAB if norm.columns is None else len(norm.columns.token_ids)
        return (logits - math.log(size)).float()

    def embed(self, prompts: PackedPrompts, pooling: Pooling) -> Tensor:
        """`EMBEDDING_WIDTH` numbers in (-1, 1) from the hash of the prompt and the pooling."""
        keys = _mix(self.prefill(prompts, 0).keys, torch.tensor(["last", "mean"].index(pooling)))
        columns = torch.arange(EMBEDDING_WIDTH)
        uniform = _log_uniform(_mix(keys[:, None], columns[None])).exp()
        return (2 * uniform - 1).float()

    def close(self) -> None:
        """Nothing to free."""


def create_backend(settings: EngineSettings) -> FakeBackend:
    """The fake backend with the settings' seed."""
    return FakeBackend(settings.seed)


def fake_log_prob(prompt: bytes, path: list[int], token: int, *, seed: int = 0) -> float:
    """log p(token | prompt, path) under `full_vocab`, in plain Python: the definition, for tests.

    `prompt` is the prompt's token ids as little-endian int64; where it has soft vectors, then their
    positions as int64 and their values as float32.
    """
    key = xxhash.xxh64_intdigest(prompt, seed=seed)
    for step in [*path, token]:
        key = _splitmix((key ^ (step * 0x9E3779B97F4A7C15)) & _MASK)
    return math.log(((key >> 11) + 0.5) / 2**53) - math.log(_VOCAB)


def _splitmix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_M1, _M2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(key: Tensor, token: Tensor) -> Tensor:
    """One step of SplitMix64 (Steele, Lea, Flood 2014) over key xor token; int64 wraps around."""
    z = (key ^ (token * _GOLDEN)) + _GOLDEN
    z = (z ^ _shift(z, 30)) * _M1
    z = (z ^ _shift(z, 27)) * _M2
    return z ^ _shift(z, 31)


def _log_uniform(key: Tensor) -> Tensor:
    return ((_shift(key, 11).double() + 0.5) / 2**53).log()

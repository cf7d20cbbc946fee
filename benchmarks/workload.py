"""The work that all contenders of a case do: users with prompts and candidates, over a catalog.

A prompt is a history: random SID tokens in level order, behind the soft tokens if there are any.
Codes are uniform, so that candidates share as few prefixes as candidates can; a learned codebook
shares more.

Legend: U users, C candidates of a user, D numbers of a vector.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases import Case
from benchmarks.checkpoint import LEVELS, PATTERNS, SOFT_TOKENS, VECTOR, Checkpoint
from engine.backend import PackedPrompts
from engine.prompts.tokenizer import CheckpointTokenizer
from engine.trees.sid_trie import SidTrie, build_trie
from schemas.requests import CandidateSets, Ints, Ragged, UserBatch
from schemas.semantic_ids import BoundSidSpace
from schemas.settings import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One case made concrete."""

    case: Case
    checkpoint: Checkpoint
    device: str
    trie: SidTrie
    space: BoundSidSpace
    prompt_codes: Ragged  # [U] codes in level order
    vectors: NDArray[np.float32] | None  # [U, D]
    candidates: Ints  # [U, C] items; C may be 0

    @property
    def prompt_tokens(self) -> list[Ints]:
        """Token ids of each user's prompt, soft tokens left out `[U]`."""
        codes = self.prompt_codes
        level = np.arange(len(codes.values)) - np.repeat(codes.offsets[:-1], codes.lengths)
        tokens: Ints = self.space.table[level % LEVELS, codes.values]
        return np.split(tokens, codes.offsets[1:-1])

    @property
    def packed_prompts(self) -> PackedPrompts:
        """The prompts as a backend takes them; for history prompts."""
        assert self.vectors is None, "soft tokens are made by the engine"
        return PackedPrompts(
            token_ids=np.concatenate(self.prompt_tokens),
            offsets=self.prompt_codes.offsets,
            static_prefix=np.empty(0, dtype=np.int64),
            soft_positions=np.empty(0, dtype=np.int64),
            soft_vectors=None,
        )

    def sid_tokens(self, sids: Ints) -> Ints:
        """Token ids of semantic IDs `[..., 3]`."""
        codes = self.trie.codes_of_sid[sids].astype(np.int64)
        tokens: Ints = self.space.table[np.arange(LEVELS), codes]
        return tokens

    @property
    def candidate_tokens(self) -> Ints:
        """Token ids of the candidates `[U, C, 3]`."""
        return self.sid_tokens(self.trie.sid_of_item[self.candidates].astype(np.int64))

    @property
    def users(self) -> UserBatch:
        """The users as the engine takes them."""
        return UserBatch(
            num_users=self.case.users,
            vectors=self.vectors,
            user_sids=self.prompt_codes,
            candidates=self._candidate_sets if self.case.task == "score" else None,
        )

    @property
    def _candidate_sets(self) -> CandidateSets:
        users, count = self.candidates.shape
        if self.case.shared:
            one = Ragged.from_lengths(np.asarray([count]), self.candidates[0])
            zeros = np.zeros(users, dtype=np.int64)
            return CandidateSets(sets=one, of_user=zeros, forbidden=zeros, shared=True)
        lists = Ragged.from_lengths(np.full(users, count), self.candidates.ravel())
        return CandidateSets.own(lists)

    @property
    def config(self) -> RunConfig:
        """The engine's settings for the case's task."""
        case, soft = self.case, self.case.prompt == "soft_token"
        task = {"search": "beam", "width": case.width} if case.task == "generate" else {"all": True}
        return RunConfig.model_validate(
            {
                "surface": "benchmark",
                "engine": {
                    "backend": "torch",
                    "model": self.checkpoint.folder,
                    "projector": self.checkpoint.projector if soft else None,
                    "dtype": self.checkpoint.dtype,
                    "device": self.device,
                },
                "sid": {"sizes": self.checkpoint.space.sizes, "tokens": PATTERNS},
                "prompt": {
                    "template": "{user_vector}{user_sid}" if soft else "{user_sid}",
                    "max_tokens": case.tokens[1],
                },
                "inputs": {"users": "unused", "catalog": "unused", "candidates": "unused"},
                "task": {"k": case.k, case.task: task},
                "output": {"path": "unused"},
            }
        )


def make_workload(case: Case, checkpoint: Checkpoint, device: str, seed: int) -> Workload:
    """Draw the catalog, the prompts and the candidates of a case."""
    codes = checkpoint.space.sizes[0]
    rng = np.random.default_rng(seed)
    soft = case.prompt == "soft_token"
    lengths = rng.integers(case.tokens[0], case.tokens[1], case.users, endpoint=True)
    lengths = lengths - (SOFT_TOKENS if soft else 0)
    assert (lengths > 0).all(), "a prompt is longer than its soft tokens"
    sets = [
        rng.choice(case.items, case.candidates, replace=False)
        for _ in range(1 if case.shared else case.users)
    ]
    candidates = np.broadcast_to(np.stack(sets), (case.users, case.candidates)).astype(np.int64)
    return Workload(
        case=case,
        checkpoint=checkpoint,
        device=device,
        trie=_catalog(case.items, codes, seed),
        space=_bind(checkpoint),
        prompt_codes=Ragged.from_lengths(lengths, rng.integers(0, codes, int(lengths.sum()))),
        vectors=rng.normal(size=(case.users, VECTOR)).astype(np.float32) if soft else None,
        candidates=np.ascontiguousarray(candidates),
    )


@functools.cache
def _catalog(items: int, codes: int, seed: int) -> SidTrie:
    rng = np.random.default_rng([seed, items])
    return build_trie(rng.integers(0, codes, (items, LEVELS), dtype=np.int32))


@functools.cache
def _bind(checkpoint: Checkpoint) -> BoundSidSpace:
    return checkpoint.space.bind(CheckpointTokenizer(checkpoint.folder).token_id)

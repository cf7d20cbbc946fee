"""Embed a shard: one vector per user, the model's hidden state of its prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipelines.inputs.read_batches import ShardInput
from pipelines.inputs.row_rules import QuarantinedRow
from pipelines.shards.score import quarantine
from schemas.requests import Ints, Rejection

if TYPE_CHECKING:
    from engine.engine import Engine

_NOT_FINITE = ("embedding_not_finite", "the model gave NaN or Inf for this user")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEmbeddings:
    """An embedded shard. Vectors of rejected users mean nothing."""

    vectors: NDArray[np.float32]  # [U, hidden]
    prompt_tokens: Ints  # [U]
    reused_tokens: Ints  # [U] of its prompt, not forwarded for it
    truncated_tokens: Ints  # [U]
    rejected: NDArray[np.bool_]  # [U]
    quarantined: list[QuarantinedRow]
    engine_seconds: float


def embed_shard(
    shard: ShardInput, engine: Engine, progress: Callable[[int], None]
) -> ShardEmbeddings:
    """Take all users of a shard through the prefill; `progress` is told how many were done."""
    num = shard.users.num_users
    started = time.perf_counter()
    prepared = engine.prepare(shard.users)
    vectors = np.zeros((num, engine.embedding_width), dtype=np.float32)
    for pack in prepared.packs:
        vectors[pack] = engine.embed(prepared, pack)
        progress(len(pack))
    seconds = time.perf_counter() - started
    rejected = np.zeros(num, dtype=bool)
    rejected[[r.user for r in prepared.rejections]] = True
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    rejections = prepared.rejections + [Rejection(int(u), *_NOT_FINITE) for u in bad]
    rejected[bad] = True
    progress(num - sum(len(pack) for pack in prepared.packs))
    return ShardEmbeddings(
        vectors=vectors,
        prompt_tokens=prepared.prompt_tokens,
        reused_tokens=prepared.reused_tokens,
        truncated_tokens=prepared.truncated_tokens,
        rejected=rejected,
        quarantined=list(quarantine(shard, rejections)),
        engine_seconds=seconds,
    )

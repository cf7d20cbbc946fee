"""What a task is to the engine: the work that it does behind one prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.backend import Backend
from engine.decoding import Decoding
from engine.packing.preparation import Prepared
from engine.trees.device_trie import DeviceTrie
from schemas.requests import Ints, ItemScores, NativeBeams, SidBeams, UserBatch
from schemas.settings import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What tasks are made of, once per engine."""

    config: RunConfig
    backend: Backend
    index: DeviceTrie


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pack of users whose prompts are prefilled."""

    decoding: Decoding
    prepared: Prepared
    pack: Ints  # [U] positions in the shard
    users: UserBatch  # [U]
    max_rows: int  # nodes that may hang from the prompts at a time

    @property
    def prompt_tokens(self) -> Ints:
        """Tokens of each prompt `[U]`."""
        return self.prepared.prompts.lengths[self.pack]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one task found for the users of a pass."""

    nodes: Ints  # [U] forwarded behind the prompt
    naive: Ints  # [U] tokens, if every item or beam sent the prompt again
    failed: NDArray[np.bool_]  # [U] no score where one was needed
    scored: ItemScores | None = None
    generated: SidBeams | None = None
    native: NativeBeams | None = None


class Task(Protocol):
    """The engine's part of a task that gives lists."""

    def most_nodes(self, prepared: Prepared, pack: Ints, max_rows: int) -> int:
        """Nodes that it appends at a time to the context of a pack."""

    def run(self, one: Pass) -> Answer:
        """Its answers for the users of a pass."""

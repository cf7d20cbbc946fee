"""What a task is: everything that the rest of the product asks about it, in one place.

A task of your own is one module beside this one, a section in schemas/task_settings.py, and a line
in `TASKS`. Nothing here loads torch: the driver plans with tasks, and only workers `start` them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from engine.prompts.labels import LabelReader
from engine.prompts.tokenizer import Tokenizer
from schemas.counts import Counts
from schemas.errors import NightshelfError
from schemas.gates import GateResult
from schemas.requests import Ints, ItemScores, SidBeams, UserBatch
from schemas.runs import ShardReceipt
from schemas.search_work import NativeBeams, SearchWork
from schemas.settings import RunConfig

if TYPE_CHECKING:
    from engine.backend import Backend
    from engine.decoding import Decoding
    from engine.packing.preparation import Preparation, Prepared
    from engine.trees.device_trie import DeviceTrie


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an average user brings, for an estimate."""

    prompt: float  # tokens
    candidates: float  # items
    levels: int  # tokens of an item
    stateless: bool  # every read sends its prompt again
    searched: float | None = None  # prefixes that a search forwarded for a user of the last run


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a task works with, once per engine."""

    backend: Backend
    index: DeviceTrie
    preparation: Preparation


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pack of users whose prompts are prefilled."""

    decoding: Decoding
    prepared: Prepared
    pack: Ints  # [U] positions in the shard
    users: UserBatch  # [U]
    max_rows: int  # nodes that may hang from the prompts at a time
    scored: ItemScores | None = None  # what a task before this one found for them

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
    search: SearchWork | None = None  # None: it did not search


class Runner(Protocol):
    """A task that gives lists, at work in an engine."""

    nodes_per_user: int  # that hang from each prompt, besides those of its candidates
    nodes_per_tree: int | None  # of a user's candidates that are forwarded, mostly; None: all

    def most_nodes(self, prepared: Prepared, pack: Ints, max_rows: int) -> int:
        """Nodes that it appends at a time to the context of a pack."""

    def run(self, one: Pass) -> Answer:
        """Its answers for the users of a pass."""


class Task:
    """A task of a run. What most tasks have in common is the default."""

    name: ClassVar[str]

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @property
    def kind(self) -> str:
        """Runs of one kind have scores that can be compared."""
        return self.name

    def check(self, tokenizer: Tokenizer, vocab_size: int | None) -> NightshelfError | None:
        """Why the model cannot do it, as far as its tokenizer tells."""
        return None

    def suffix_tokens(self, tokenizer: Tokenizer) -> int:
        """Tokens that stand behind an item."""
        return 0

    def label_reader(self, tokenizer: Tokenizer, vocab_size: int) -> LabelReader | None:
        """Reads users' labels; None where the task has none.

        Raises:
            EngineError: a configured label is not one token of the model.
        """
        return None

    def rows_forwarded(self, load: Load) -> float:
        """Rows behind a prompt that are forwarded for one user, at most."""
        return 0.0

    def columns(self) -> tuple[pa.Field, ...]:
        """Columns of the published rows, besides those that all lists have."""
        return ()

    def column_values(
        self, users: UserBatch, user: Ints, labels: NDArray[np.float32] | None
    ) -> dict[str, pa.Array]:
        """What stands in these columns.

        Args:
            user: of each row `[M]`.
            labels: scores of labels `[M, most labels]`, where the task gave some.
        """
        return {}

    def gates(self, counts: Counts, receipts: list[ShardReceipt]) -> list[GateResult]:
        """Gates on what the engine says of its own lists."""
        return []

    def start(self, setup: Setup) -> Runner:
        """The task at work; loads torch.

        Raises:
            EngineError: it cannot be done here.
        """
        raise NotImplementedError(f"{self.name} gives no lists")

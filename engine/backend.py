"""The one primitive: prefill prompts once, hang token trees on them, read log-probabilities.

A *row* is a place a next token can be predicted from. In a context of B prompts, rows 0..B-1 are
the prompt ends and row B + i is the i-th node that was appended. Item scoring, label scoring and
beam search are written once over this protocol; a backend only supplies it.

Legend: B prompts, T prompt tokens, n nodes of one call, R rows read, M targets read, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from schemas.requests import Ints
from schemas.settings import EngineSettings, Pooling, ScoreNorm

if TYPE_CHECKING:
    from torch import Tensor, device

ROUNDING = 1e-3  # nats that a log-probability may lie above 0; more is none


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """What a backend says about itself."""

    name: str
    vocab_size: int  # rows of the embedding matrix; any id below is accepted
    hidden_size: int  # width of a soft token; 0: any width
    embedding_width: int  # numbers that `embed` gives per prompt
    rows_that_fit: int | None = None  # rows of a pack for this device's memory; None: not known
    shares_prefix: bool = True  # the static prefix is forwarded once, not with each prompt
    stateless: bool = False  # every read sends its prompts again
    max_positions: int  # longest prompt + tree depth
    dtype: str
    device: device
    code_path: str = ""  # which of its code runs here, in words


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TokenColumns:
    """A set of token ids whose logits are read together, such as the codebook of one level.

    Compared by identity, so that a backend may keep what it derives from one (a slice of its head).
    """

    token_ids: Ints  # [C]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPrompts:
    """B prompts end to end, without the static prefix they all share.

    `soft_vectors[s]` stands in for the embedding of the token at `soft_positions[s]`.
    """

    token_ids: Ints  # [T]
    offsets: Ints  # [B + 1]; no prompt is empty
    static_prefix: Ints  # [P] tokens in front of every prompt
    soft_positions: Ints  # [S] positions in token_ids
    soft_vectors: Tensor | None  # [S, hidden] float32

    @property
    def num_prompts(self) -> int:
        """B."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ints:
        """Tokens of each prompt, the static prefix not counted `[B]`."""
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBatch:
    """n tree nodes to append. A parent may be a prompt end, an older node, or a node of this call.

    `slot` numbers the nodes of one prompt inside this call, each below `num_slots`: it tells the
    backend where a node goes when it lays nodes out as `[B, num_slots]`, without asking the device.
    """

    prompt: Tensor  # [n] int64
    parent: Tensor  # [n] int64 row
    token: Tensor  # [n] int64
    depth: Tensor  # [n] int64, 1 for a child of a prompt end
    slot: Tensor  # [n] int64
    num_slots: int
    max_depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """M (row, column) pairs whose log-probability is read. `row` is ascending.

    Pairs with `real` False are padding: their value is meaningless and they never enter a
    normaliser.
    """

    row: Tensor  # [M] int64, index into the rows of the call
    column: Tensor  # [M] int64, index into columns
    columns: TokenColumns
    real: Tensor | None = None  # [M] bool


@dataclass(frozen=True, slots=True)
class Norm:
    """What p is a softmax over (DESIGN: score semantics).

    `columns` holds the token ids for `sid_range` and `level`; under `trie` the softmax is over the
    row's own targets: all children of the row's prefix, or the labels asked about.
    """

    kind: ScoreNorm
    columns: TokenColumns | None = None


class Context(Protocol):
    """Prompts and the nodes hanging from them. Made by `prefill`; grows with `extend`.

    A backend that forwards more than each prompt and node once says so by `forwarded` `[B]`, the
    tokens that it sent for each prompt until now.
    """

    @property
    def num_prompts(self) -> int:
        """B."""

    @property
    def num_rows(self) -> int:
        """B + nodes appended so far; the row number the next node will get."""

    def rewind(self, num_rows: int) -> None:
        """Forget the nodes from row `num_rows` on; their memory is used again. Prompts stay."""


class Backend(Protocol):
    """What runs the model. Effects and shapes of each method are part of the contract."""

    @property
    def facts(self) -> BackendFacts:
        """Sizes, precision and device."""

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> Context:
        """Forward the prompts once and keep one KV per prompt.

        The static prefix is forwarded the first time it is seen and shared by reference afterwards.
        `max_nodes` is how many nodes will be appended; more are accepted, at the price of a copy.
        """

    def extend(self, context: Context, nodes: NodeBatch) -> None:
        """Forward nodes and append them to the context: rows `num_rows .. num_rows + n - 1`.

        A node sees its prompt and its ancestors and nothing else. Nothing stored is moved or
        copied.
        """

    def log_probs(self, context: Context, rows: Tensor, targets: Targets, norm: Norm) -> Tensor:
        """Log-probabilities, nats, float32 `[M]`, each <= 0, of `targets` at `rows` `[R]`.

        Only these rows go through the LM head. NaN where the model gave NaN.
        """

    def embed(self, prompts: PackedPrompts, pooling: Pooling) -> Tensor:
        """The model's last hidden state, behind its final norm, pooled per prompt `[B, hidden]`
        float32: that of the last token, or the mean over the prompt, the static prefix included.
        """

    def close(self) -> None:
        """Free the device; nothing may be called afterwards."""


BackendFactory = Callable[[EngineSettings], Backend]

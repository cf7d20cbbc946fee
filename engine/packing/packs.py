"""Pack users into batches under a row budget. A pure function of the shard; a user is never split.

Users are sorted by prompt length (stable), so that a batch holds prompts of about one length and
padding inside attention stays small; batches are then filled in that order. Callers put results
back in input order by the indices they were given: order in is order out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from schemas.requests import Ints


@dataclass(frozen=True, slots=True)
class PackingBudget:
    """Most rows (prompt tokens, tree nodes, beams) and users of one batch."""

    max_rows: int
    max_users: int


def pack_users(prompt_tokens: Ints, other_rows: Ints, budget: PackingBudget) -> Iterator[Ints]:
    """Yield the users of each batch, as positions in the input.

    Args:
        prompt_tokens: `[U]` prompt length of each user.
        other_rows: `[U]` tree nodes and beams of each user.
        budget: a user over it alone gets a batch of its own; the engine then works in chunks.
    """
    order = np.argsort(prompt_tokens, kind="stable").astype(np.int64)
    cost = (prompt_tokens + other_rows)[order]
    ends = np.cumsum(cost)
    start = 0
    while start < len(order):
        before = int(ends[start - 1]) if start else 0
        end = int(np.searchsorted(ends, before + budget.max_rows, side="right"))
        end = min(max(end, start + 1), start + budget.max_users)
        yield order[start:end]
        start = end

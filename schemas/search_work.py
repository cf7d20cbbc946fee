"""What a search took for each user: how far it went, and whether it ran into its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchWork:
    """Of the searches behind each prompt of a batch, all `[U]`."""

    nodes: Ints  # prefixes forwarded
    rounds: Ints  # passes of the model
    stopped: NDArray[
        np.bool_
    ]  # best-first search that ended as a beam: its budget, or a flat model

    def __add__(self, other: SearchWork) -> SearchWork:
        return SearchWork(
            nodes=self.nodes + other.nodes,
            rounds=self.rounds + other.rounds,
            stopped=self.stopped | other.stopped,
        )

    def take(self, users: Ints) -> SearchWork:
        """Of the users at these places."""
        return SearchWork(
            nodes=self.nodes[users], rounds=self.rounds[users], stopped=self.stopped[users]
        )

    def put(self, users: Ints, work: SearchWork) -> None:
        """Take the work for the users at these places."""
        self.nodes[users], self.rounds[users] = work.nodes, work.rounds
        self.stopped[users] = work.stopped

    @classmethod
    def total(cls, parts: Sequence[SearchWork | None]) -> SearchWork | None:
        """Of several searches for the same users; None when there was none."""
        known = [part for part in parts if part is not None]
        return sum(known[1:], start=known[0]) if known else None

    @classmethod
    def none(cls, num_users: int) -> SearchWork:
        """Users whom no search was for."""
        nodes, rounds = np.zeros((2, num_users), dtype=np.int64)
        return cls(nodes=nodes, rounds=rounds, stopped=np.zeros(num_users, dtype=bool))

    @classmethod
    def join(cls, parts: Sequence[tuple[int, SearchWork | None]]) -> SearchWork | None:
        """Of batches one after another, of so many users each; None when none was searched."""
        if all(part is None for _, part in parts):
            return None
        every = [cls.none(users) if part is None else part for users, part in parts]
        return cls(
            nodes=np.concatenate([part.nodes for part in every]),
            rounds=np.concatenate([part.rounds for part in every]),
            stopped=np.concatenate([part.stopped for part in every]),
        )

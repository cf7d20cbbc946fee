"""What a search took for each user, and what became of an engine's own beams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeBeams:
    """What became of an engine's own beams (engine/generate/native_beams.py); counts add up."""

    beams: int = 0  # that the engine gave
    incomplete: int = 0  # empty, or shorter or longer than a semantic ID
    without_score: int = 0  # not finite
    invalid: int = 0  # name no item
    doubled: int = 0
    compared: int = 0  # items of constrained lists that were looked for …
    in_common: int = 0  # … and found

    def __add__(self, other: NativeBeams) -> NativeBeams:
        return NativeBeams(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def total(cls, parts: Iterable[NativeBeams | None]) -> NativeBeams | None:
        """Sum of the parts that there are; None when there is none."""
        known = [part for part in parts if part is not None]
        return sum(known, start=cls()) if known else None

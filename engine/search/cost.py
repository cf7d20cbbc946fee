"""What a search usually costs, for packing and estimates. No torch here."""

from __future__ import annotations

from engine.backend import BackendFacts

_FIRST = 16  # prefixes of a prompt in the first rounds; fewer take more rounds for no fewer of them
_WIDE = 32  # where a pass is far from full, or starting it costs as much as its rows
_STATELESS = 64  # where every round sends the prompts again
_FULL = 256  # rows from which on a pass of a CPU is about as fast as any
ROUNDS = 3.5  # passes of the model behind the prompt


def usual_nodes(k: int) -> int:
    """Prefixes that a best-first search forwards for one user of a trained model.

    Measured on the MovieLens example: 44 for 10 results and 55 for 20, among 500 candidates or in
    the whole catalog (docs/search.md); rounded up, so that most users fit their plan.
    """
    return 32 + 2 * k


def first_round(facts: BackendFacts, num_prompts: int) -> int:
    """Prefixes of a prompt that the first rounds of a search forward.

    In float32 on a CPU a row's bits are its own, and what a prompt gets must not hang on how many
    share its pass: there it is always the same.
    """
    if facts.stateless:
        return _STATELESS
    if facts.device.type == "cpu":
        own_bits = facts.dtype == "float32"
        return _FIRST if own_bits or num_prompts * _FIRST >= _FULL else _WIDE
    return _WIDE

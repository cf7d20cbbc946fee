"""What a search usually costs, for packing and estimates. No torch here."""

from __future__ import annotations

ROUNDS = 3.5  # passes of the model behind the prompt


def usual_nodes(k: int) -> int:
    """Prefixes that a best-first search forwards for one user of a trained model.

    Measured on the MovieLens example: 44 for 10 results and 55 for 20, among 500 candidates or in
    the whole catalog (docs/search.md); rounded up, so that most users fit their plan.
    """
    return 32 + 2 * k

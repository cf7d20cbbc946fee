"""What tasks over candidate sets have in common: token trees, and what may not be scored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.tasks.task import Answer, Pass
from engine.trees.candidate_trees import unsound, without_forbidden
from schemas.requests import CandidateSets, Ints, ItemScores

if TYPE_CHECKING:
    from engine.packing.preparation import Preparation, Prepared
    from engine.trees.token_tree import TokenTree


class CandidateRunner:
    """Scores every candidate of every user of a pass."""

    nodes_per_user = 0
    nodes_per_tree: int | None = None

    def __init__(self, preparation: Preparation) -> None:
        self.preparation = preparation

    def most_nodes(self, prepared: Prepared, pack: Ints, max_rows: int) -> int:
        """Nodes of the users' token trees, as far as they are kept at a time."""
        return min(int(prepared.planned_rows[pack].sum()), max_rows)

    def run(self, one: Pass) -> Answer:
        """Scores of every candidate that its user may get."""
        prepared, candidates = one.prepared, one.users.candidates
        assert candidates is not None, "prepared with the task"
        tree = self.preparation.trees.of_pack(prepared.shared_tree, candidates)
        scored, nodes = self.score(one, candidates, tree)
        scored = without_forbidden(scored, one.users)
        labels = prepared.labels.of_user.lengths[one.pack] if prepared.labels else None
        failed = np.zeros(one.users.num_users, dtype=bool)
        failed[scored.user[unsound(scored, labels)]] = True
        naive = self.naive(one, candidates)
        return Answer(scored=scored, nodes=nodes, naive=naive, failed=failed)

    def naive(self, one: Pass, candidates: CandidateSets) -> Ints:
        """Tokens, if every candidate sent the prompt again `[U]`."""
        return candidates.lengths * one.prompt_tokens + one.prepared.candidate_tokens[one.pack]

    def score(
        self, one: Pass, candidates: CandidateSets, tree: TokenTree
    ) -> tuple[ItemScores, Ints]:
        """Scores of all candidates, and the nodes forwarded per user `[U]`."""
        raise NotImplementedError

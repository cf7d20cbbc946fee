"""`task.score` and `task.label`: every candidate of every user, in one pass over token trees."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from engine.packing.preparation import Preparation, Prepared
from engine.scoring.items import score_in_parts, unsound
from engine.scoring.labels import label_items
from engine.tasks.task import Answer, Pass
from engine.trees.candidate_trees import without_forbidden
from engine.trees.token_tree import TokenTree
from schemas.requests import CandidateSets, Ints, ItemScores
from schemas.settings import LabelSettings, ScoreSettings


class _CandidateTask:
    """What scoring and labelling have in common."""

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation

    def most_nodes(self, prepared: Prepared, pack: Ints, max_rows: int) -> int:
        """Nodes of the users' token trees, as far as they are kept at a time."""
        return min(int(prepared.tree_rows[pack].sum()), max_rows)

    def run(self, one: Pass) -> Answer:
        """Scores of every candidate that its user may get."""
        prepared, candidates = one.prepared, one.users.candidates
        assert candidates is not None, "a task with candidates was prepared with them"
        tree = self._preparation.trees.of_pack(prepared.shared_tree, candidates)
        scored, nodes = self._score(one, candidates, tree)
        scored = without_forbidden(scored, one.users)
        labels = prepared.labels.of_user.lengths[one.pack] if prepared.labels else None
        failed = np.zeros(one.users.num_users, dtype=bool)
        failed[scored.user[unsound(scored, labels)]] = True
        naive = candidates.lengths * one.prompt_tokens + prepared.candidate_tokens[one.pack]
        return Answer(scored=scored, nodes=nodes, naive=naive, failed=failed)

    def _score(
        self, one: Pass, candidates: CandidateSets, tree: TokenTree
    ) -> tuple[ItemScores, Ints]:
        raise NotImplementedError


class Score(_CandidateTask):
    """The log-probability of each candidate's tokens."""

    def __init__(self, settings: ScoreSettings, preparation: Preparation) -> None:
        super().__init__(preparation)
        self._length_norm = settings.length_norm

    def _score(
        self, one: Pass, candidates: CandidateSets, tree: TokenTree
    ) -> tuple[ItemScores, Ints]:
        lists = candidates.lists()
        scores, nodes = score_in_parts(
            one.decoding, lists, one.max_rows, tree=tree, length_norm=self._length_norm
        )
        return ItemScores(user=lists.row_ids, item=lists.values, score=_host(scores)), nodes


class Label(_CandidateTask):
    """The log-probability of labels behind each candidate; the first one is its score."""

    def __init__(self, settings: LabelSettings, preparation: Preparation) -> None:
        super().__init__(preparation)
        self._softmax = settings.softmax

    def _score(
        self, one: Pass, candidates: CandidateSets, tree: TokenTree
    ) -> tuple[ItemScores, Ints]:
        lists, labels = candidates.lists(), one.prepared.labels
        assert labels is not None, "prepared with the task"
        found, nodes = label_items(
            one.decoding,
            lists,
            labels.of_user.take(one.pack),
            labels.columns,
            suffix=self._preparation.label_suffix,
            softmax=self._softmax,
            max_rows=one.max_rows,
            tree=tree,
        )
        every = _host(found)
        return (
            ItemScores(user=lists.row_ids, item=lists.values, score=every[:, 0], labels=every),
            nodes,
        )


def _host(scores: Tensor) -> np.ndarray:
    return scores.float().cpu().numpy()

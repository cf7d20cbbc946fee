"""`task.score`: the log-probability of every candidate of every user, over token trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.tasks.candidates import CandidateRunner
from engine.tasks.task import Load, Pass, Runner, Setup, Task
from schemas.requests import CandidateSets, Ints, ItemScores
from schemas.settings import ScoreSettings

if TYPE_CHECKING:
    from engine.packing.preparation import Preparation
    from engine.trees.token_tree import TokenTree


class Score(Task):
    """Ranks a user's candidates by the log-probabilities of their tokens."""

    name = "score"

    @property
    def kind(self) -> str:
        """An item has one score, whether it was scored or generated."""
        return f"score {self.config.task.score_norm}"

    def rows_forwarded(self, load: Load) -> float:
        """An item's last token is read, not forwarded; a stateless backend sends it too."""
        return load.candidates * (load.levels - (not load.stateless))

    def start(self, setup: Setup) -> Runner:
        """Scoring at work."""
        assert self.config.task.score is not None, "the run scores"
        return _Scoring(setup.preparation, self.config.task.score)


class _Scoring(CandidateRunner):
    def __init__(self, preparation: Preparation, settings: ScoreSettings) -> None:
        super().__init__(preparation)
        self._length_norm = settings.length_norm

    def score(
        self, one: Pass, candidates: CandidateSets, tree: TokenTree
    ) -> tuple[ItemScores, Ints]:
        """Scores of all candidates, and the nodes forwarded per user `[U]`."""
        from engine.scoring.items import score_in_parts

        lists = candidates.lists()
        scores, nodes = score_in_parts(
            one.decoding, lists, one.max_rows, tree=tree, length_norm=self._length_norm
        )
        host = scores.float().cpu().numpy()
        return ItemScores(user=lists.row_ids, item=lists.values, score=host), nodes

"""`task.score`: the best candidates of every user by log-probability, over token trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.search.cost import ROUNDS, usual_nodes
from engine.tasks.candidates import CandidateRunner
from engine.tasks.task import Answer, Load, Pass, Runner, Setup, Task
from engine.trees.candidate_trees import allowed_items
from schemas.requests import CandidateSets, Ints, ItemScores
from schemas.settings import RunConfig, ScoreSettings

if TYPE_CHECKING:
    from engine.trees.token_tree import TokenTree

_WORTH = 1.2  # nodes of all candidates for each of a search, from which on a search is faster


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
        return _Scoring(setup, self.config, self.config.task.score)


class _Scoring(CandidateRunner):
    """Ranks by search where that is less work than scoring every candidate."""

    def __init__(self, setup: Setup, config: RunConfig, settings: ScoreSettings) -> None:
        super().__init__(setup.preparation)
        self._length_norm = settings.length_norm
        self._k = config.task.k
        # Items named by text have long paths without branches: as many rounds as tokens.
        self._may_search = not settings.all and config.sid is not None
        self._stateless = setup.backend.facts.stateless
        if self._may_search and not self._stateless:
            self.nodes_per_tree = usual_nodes(self._k)

    def run(self, one: Pass) -> Answer:
        """The best candidates of each user, or all of them; the lists are the same."""
        assert one.users.candidates is not None, "prepared with the task"
        if not self._may_search or not self._pays(one):
            return super().run(one)
        return self._ranked(one, one.users.candidates) or super().run(one)

    def _pays(self, one: Pass) -> bool:
        """Whether a search probably forwards less. A stateless backend sends the prompts with
        every round."""
        expected = usual_nodes(self._k) * len(one.pack)
        if self._stateless:
            expected += int(ROUNDS * one.prompt_tokens.sum())
        return int(one.prepared.tree_rows[one.pack].sum()) > _WORTH * expected

    def _ranked(self, one: Pass, candidates: CandidateSets) -> Answer | None:
        """By search; None where it would take more memory than a pass may."""
        from engine.scoring.ranking import rank_candidates

        lists, trees = candidates.lists(), self.preparation.trees
        if candidates.shared and candidates.forbidden.any():
            lists = lists.keep(allowed_items(lists.row_ids, lists.values, one.users))
            tree = trees.of_pack(None, CandidateSets.own(lists))
        else:
            tree = trees.of_pack(one.prepared.shared_tree, candidates)
        ranking = rank_candidates(one.decoding, lists, tree, k=self._k, max_nodes=one.max_rows)
        if ranking is None:
            return None
        return Answer(
            scored=ranking.scored,
            nodes=ranking.work.nodes,
            naive=self.naive(one, candidates),
            failed=ranking.failed,
            search=ranking.work,
        )

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

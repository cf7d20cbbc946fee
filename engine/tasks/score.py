"""`task.score`: the best candidates of every user by log-probability, over token trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.search.cost import ROUNDS, usual_nodes
from engine.tasks.candidates import CandidateRunner
from engine.tasks.task import Answer, Load, Pass, Runner, Setup, Task
from engine.trees.candidate_trees import allowed_items
from schemas.requests import CandidateSets, Ints, ItemScores
from schemas.settings import LengthNorm

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
        """An item's last token is read, not forwarded; a stateless backend sends it too. A search
        forwards no more than it needs."""
        every = load.candidates * (load.levels - (not load.stateless))
        if not self._may_search:
            return every
        nodes = load.searched or usual_nodes(self.config.task.k)
        if load.stateless:
            nodes = nodes * load.levels + ROUNDS * load.prompt
        return min(every, nodes)

    @property
    def _may_search(self) -> bool:
        """Items named by text have long paths without branches: as many rounds as tokens."""
        settings = self.config.task.score
        return settings is not None and not settings.all and self.config.sid is not None

    def start(self, setup: Setup) -> Runner:
        """Scoring at work."""
        assert self.config.task.score is not None, "the run scores"
        length_norm = self.config.task.score.length_norm
        k = self.config.task.k if self._may_search else None
        return _Scoring(setup, k, length_norm)


class _Scoring(CandidateRunner):
    """Ranks by search where that is less work than scoring every candidate."""

    def __init__(self, setup: Setup, k: int | None, length_norm: LengthNorm) -> None:
        """`k`: of the lists; None: every candidate is scored."""
        super().__init__(setup.preparation)
        self._length_norm: LengthNorm = length_norm
        self._k = k
        self._stateless = setup.backend.facts.stateless
        if k is not None and not self._stateless:
            self.nodes_per_tree = usual_nodes(k)

    def run(self, one: Pass) -> Answer:
        """The best candidates of each user, or all of them; the lists are the same."""
        assert one.users.candidates is not None, "prepared with the task"
        if self._k is None or not self._pays(one, self._k):
            return super().run(one)
        return self._ranked(one, one.users.candidates, self._k) or super().run(one)

    def _pays(self, one: Pass, k: int) -> bool:
        """Whether a search probably forwards less. A stateless backend sends the prompts with
        every round."""
        expected = usual_nodes(k) * len(one.pack)
        if self._stateless:
            expected += int(ROUNDS * one.prompt_tokens.sum())
        return int(one.prepared.tree_rows[one.pack].sum()) > _WORTH * expected

    def _ranked(self, one: Pass, candidates: CandidateSets, k: int) -> Answer | None:
        """By search; None where it would take more memory than a pass may."""
        from engine.scoring.ranking import rank_candidates

        lists, trees = candidates.lists(), self.preparation.trees
        if candidates.shared and candidates.forbidden.any():
            lists = lists.keep(allowed_items(lists.row_ids, lists.values, one.users))
            tree = trees.of_pack(None, CandidateSets.own(lists))
        else:
            tree = trees.of_pack(one.prepared.shared_tree, candidates)
        ranking = rank_candidates(
            one.decoding, lists, tree, k=k, k_of=one.users.k, max_nodes=one.max_rows
        )
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

"""`task.generate`: beams over the catalog's trie, or an engine's own beams held against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.search.cost import ROUNDS, usual_nodes
from engine.tasks.task import Answer, Load, Pass, Runner, Setup, Task
from engine.trees.candidate_trees import kth_of_candidates
from engine.trees.exclusions import EligibleTrie, dead_nodes
from schemas.counts import Counts
from schemas.gates import GateResult, threshold
from schemas.requests import Eligibility, UserBatch
from schemas.runs import ShardReceipt
from schemas.settings import GenerateSettings

if TYPE_CHECKING:
    from torch import Tensor

    from engine.packing.preparation import Prepared
    from engine.search.best_first import Bounds
    from engine.search.masks import SegmentMask
    from schemas.requests import Ints


class Generate(Task):
    """Searches the catalog for each user's best k semantic IDs."""

    name = "generate"

    @property
    def kind(self) -> str:
        """An item has one score, whether it was scored or generated."""
        return f"score {self.config.task.score_norm}"

    @property
    def settings(self) -> GenerateSettings:
        """Its section."""
        assert self.config.task.generate is not None, "the run generates"
        return self.config.task.generate

    def rows_forwarded(self, load: Load) -> float:
        """What a search goes through, or the beams of all levels but the last; a stateless backend
        sends a chain for each, and the prompt again with every level or round."""
        widths = self.settings.widths(load.levels)[: load.levels - 1]
        native = self.settings.mode == "native"
        if self.settings.search != "beam" and not native:
            nodes = load.searched or usual_nodes(self.config.task.k)
            return nodes * load.levels + ROUNDS * load.prompt if load.stateless else nodes
        if not load.stateless or native:
            return sum(widths)
        chains = sum(width * (depth + 2) for depth, width in enumerate(widths))
        return (load.levels - 1) * load.prompt + chains

    def gates(self, counts: Counts, receipts: list[ShardReceipt]) -> list[GateResult]:
        """Lists that are proven exact, and how much of the model's mass the catalog holds."""
        limits = self.config.audit
        exact = counts.users_exact / max(counts.users_recommended, 1)
        detail = "share of lists proven exact"
        found = [threshold("exact_share", exact, detail, least=limits.min_exact_share)]
        if self.config.task.score_norm == "full_vocab":
            users = counts.users_recommended + counts.users_without_eligible
            mass = sum(receipt.legal_mass_sum for receipt in receipts) / max(users, 1)
            detail = "mean probability that the first token stays in the catalog"
            found.append(threshold("legal_mass", mass, detail, least=limits.min_legal_mass))
        return found

    def start(self, setup: Setup) -> Runner:
        """Generation at work.

        Raises:
            EngineError: native beams are asked for and cannot be.
        """
        from engine.generate.bounds import nodes_per_prompt
        from engine.generate.native_beams import NativeBackend, uses_native_beams

        trie, config = setup.index.trie, self.config
        widths = self.settings.widths(config.space.num_levels)
        native = uses_native_beams(config, self.settings, trie, setup.backend)
        if native:
            assert isinstance(setup.backend, NativeBackend), "`uses_native_beams` looked"
            setup.backend.start_beams(
                width=widths[0], steps=trie.depth, prompt_tokens=config.prompt.max_tokens
            )
        nodes = nodes_per_prompt(trie, widths)
        if self.settings.search != "beam" and not native:
            nodes = min(nodes, usual_nodes(config.task.k))
        return _Generating(
            self.settings,
            setup,
            widths=widths,
            k=min(config.task.k, trie.num_sids),
            nodes_per_user=nodes,
            native=native,
        )


class _Generating:
    nodes_per_tree: int | None = None

    def __init__(
        self,
        settings: GenerateSettings,
        setup: Setup,
        *,
        widths: tuple[int, ...],
        k: int,
        nodes_per_user: int,
        native: bool,
    ) -> None:
        self.nodes_per_user = nodes_per_user
        self._settings, self._index = settings, setup.index
        self._widths, self._k, self._native = widths, k, native
        self._segments: tuple[EligibleTrie, Tensor] | None = None

    def most_nodes(self, prepared: Prepared, pack: Ints, max_rows: int) -> int:
        """Beams of all levels of all users."""
        return self.nodes_per_user * len(pack)

    def run(self, one: Pass) -> Answer:
        """The beams of all users; with `exact`, again and wider for those not certified."""
        from engine.generate.native_beams import search_natively
        from engine.generate.search import search

        depth, native, work = self._index.trie.depth, None, None
        if self._native:
            beams, failed, native = search_natively(
                one.decoding, self._settings, k=self._k, max_rows=one.max_rows
            )
            nodes = beams.width * (depth - 1)  # the last token is not fed back
        else:
            dead, segments = self._masks(one.users)
            beams, failed, work = search(
                one.decoding,
                self._settings,
                widths=self._widths,
                k=self._k,
                dead=dead,
                segments=segments,
                bounds=self._bounds(one),
            )
            nodes = work.nodes
        naive = np.maximum(beams.width, max(self._widths)) * (one.prompt_tokens + depth - 1)
        return Answer(
            generated=beams, nodes=nodes, naive=naive, failed=failed, native=native, search=work
        )

    def _bounds(self, one: Pass) -> Bounds:
        """Each user's own k; and the k-th score among its candidates, where those were scored:
        what is below cannot be in the list of both."""
        from engine.search.best_first import Bounds

        index, num = self._index, one.users.num_users
        k = np.full(num, self._k) if one.users.k is None else np.minimum(one.users.k, self._k)
        floor = None
        if one.scored is not None:
            floor = index.put(kth_of_candidates(index, one.scored, k))
        return Bounds(None if one.users.k is None else index.put(k), floor)

    def _masks(self, users: UserBatch) -> tuple[Tensor | None, SegmentMask | None]:
        """The prefixes that each user may not enter, and those that its segment may."""
        eligible, segments = self._eligible(users.eligibility)
        if users.excluded is None or not len(users.excluded.values):
            return None, segments
        keys = dead_nodes(self._index.trie, users.excluded, users.eligibility, eligible)
        return self._index.put(keys), segments

    def _eligible(
        self, eligibility: Eligibility | None
    ) -> tuple[EligibleTrie | None, SegmentMask | None]:
        """The trie as the batch's segments see it; propagated once for all packs of a shard."""
        from engine.search.masks import SegmentMask

        if eligibility is None:
            return None, None
        if self._segments is None or self._segments[0].eligible is not eligibility.eligible:
            trie = EligibleTrie(self._index.trie, eligibility.eligible)
            self._segments = (trie, self._index.put(trie.alive))
        trie, alive = self._segments
        return trie, SegmentMask(alive, self._index.put(eligibility.segment))

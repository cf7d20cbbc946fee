"""`task.generate`: beams over the catalog's trie, or an engine's own beams held against it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.generate.bounds import nodes_per_prompt
from engine.generate.frontier import SegmentMask
from engine.generate.native_beams import NativeBackend, search_natively, uses_native_beams
from engine.generate.search import search
from engine.packing.preparation import Prepared
from engine.tasks.task import Answer, Pass, Setup
from engine.trees.exclusions import EligibleTrie, dead_nodes
from schemas.requests import Eligibility, Ints, UserBatch
from schemas.settings import GenerateSettings


class Generate:
    """The best k semantic IDs of the catalog for each user."""

    def __init__(self, settings: GenerateSettings, setup: Setup) -> None:
        config, trie = setup.config, setup.index.trie
        self._settings = settings
        self._index = setup.index
        self._widths = settings.widths(config.space.num_levels)
        self._k = min(config.task.k, trie.num_sids)
        self.nodes_per_user = nodes_per_prompt(trie, self._widths)
        self._segments: tuple[EligibleTrie, Tensor] | None = None
        self._native = uses_native_beams(config, trie, setup.backend)
        if self._native:
            assert isinstance(setup.backend, NativeBackend), "uses_native_beams checked it"
            setup.backend.start_beams(
                width=self._widths[0], steps=trie.depth, prompt_tokens=config.prompt.max_tokens
            )

    def most_nodes(self, prepared: Prepared, pack: Ints, max_rows: int) -> int:
        """Beams of all levels of all users."""
        return self.nodes_per_user * len(pack)

    def run(self, one: Pass) -> Answer:
        """The beams of all users; with `exact`, again and wider for those not certified."""
        depth = self._index.trie.depth
        native = None
        if self._native:
            beams, failed, native = search_natively(
                one.decoding,
                width=self._widths[0],
                k=self._k,
                rescore=self._settings.rescore,
                compare_users=self._settings.compare_users,
                max_rows=one.max_rows,
            )
            nodes = beams.width * (depth - 1)  # the last token is not fed back
        else:
            dead, segments = self._masks(one.users)
            beams, failed, nodes = search(
                one.decoding,
                self._settings,
                widths=self._widths,
                k=self._k,
                dead=dead,
                segments=segments,
            )
        naive = beams.width * (one.prompt_tokens + depth - 1)
        return Answer(generated=beams, nodes=nodes, naive=naive, failed=failed, native=native)

    def _masks(self, users: UserBatch) -> tuple[Tensor | None, SegmentMask | None]:
        """The prefixes that each user may not enter, and those that its segment may."""
        eligible, segments = self._eligible(users.eligibility)
        if users.excluded is None or not len(users.excluded.values):
            return None, segments
        keys = dead_nodes(self._index.trie, users.excluded, users.eligibility, eligible)
        return torch.from_numpy(keys).to(self._index.device), segments

    def _eligible(
        self, eligibility: Eligibility | None
    ) -> tuple[EligibleTrie | None, SegmentMask | None]:
        """The trie as the batch's segments see it; propagated once for all packs of a shard."""
        if eligibility is None:
            return None, None
        index = self._index
        if self._segments is None or self._segments[0].eligible is not eligibility.eligible:
            trie = EligibleTrie(index.trie, eligibility.eligible)
            self._segments = (trie, torch.from_numpy(trie.alive).to(index.device))
        trie, alive = self._segments
        return trie, SegmentMask(alive, torch.from_numpy(eligibility.segment).to(index.device))

"""The engine: one process, one device, one backend, and the algorithms over it.

`Engine.prepare` builds a shard's prompts and packs its users; `Engine.run` takes one pack through
prefill, scoring and generation over that same prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backend import Backend, Context
from engine.beam_search import (
    Beams,
    SegmentMask,
    beam_search,
    join_beams,
    most_slots,
    rows_per_prompt,
)
from engine.device_trie import to_device
from engine.exclusions import EligibleTrie, dead_nodes
from engine.item_scoring import score_in_parts
from engine.packing import PackingBudget, pack_users
from engine.prompts import PromptBuilder, PromptSet
from engine.registry import create_backend
from engine.sid_trie import SidTrie
from engine.token_tree import tree_rows
from engine.tokenizer import bind_space, load_tokenizer
from engine.user_projector import UserProjector, load_projector
from schemas.errors import EngineError, NightshelfError
from schemas.requests import (
    BatchResult,
    Eligibility,
    Ints,
    ItemScores,
    Ragged,
    Rejection,
    SidBeams,
    UserBatch,
)
from schemas.settings import GenerateSettings, RunConfig

_MAX_SLOTS = 1 << 24  # child slots of the beams that step together; bounds a step's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A shard's users with their prompts, and which of them share a pass."""

    users: UserBatch
    prompts: PromptSet
    tree_rows: Ints  # [U] nodes of each user's token tree
    packs: list[Ints]

    @property
    def rejections(self) -> list[Rejection]:
        """Users whose prompt cannot be built."""
        return self.prompts.rejections

    @property
    def prompt_tokens(self) -> Ints:
        """Tokens of each prompt `[U]`."""
        return self.prompts.lengths

    @property
    def truncated_tokens(self) -> Ints:
        """History tokens dropped to fit `[U]`."""
        return self.prompts.truncated


class Engine:
    """Scores and generates for batches of users. Build it with `open_engine`."""

    def __init__(self, config: RunConfig, trie: SidTrie, backend: Backend) -> None:
        self._config = config
        self._trie = trie
        self._backend = backend
        tokenizer = load_tokenizer(config)
        space = bind_space(config, tokenizer)
        facts = backend.facts
        if space.max_token_id >= facts.vocab_size:
            raise EngineError(
                "the model has no embedding for some semantic-ID tokens",
                expected=f"ids below {facts.vocab_size}",
                got=f"id {space.max_token_id}",
            )
        longest = config.prompt.max_tokens + trie.depth
        if longest > facts.max_positions:
            raise EngineError(
                "prompts may be longer than the model's positions",
                expected=f"prompt.max_tokens + {trie.depth} <= {facts.max_positions}",
                got=f"prompt.max_tokens {config.prompt.max_tokens}",
                do=f"Set prompt.max_tokens to at most {facts.max_positions - trie.depth}.",
            )
        self._projector = self._load_projector()
        num_soft = self._projector.spec.num_tokens if self._projector else 1
        self._prompts = PromptBuilder(config.prompt, tokenizer, space, trie, num_soft)
        task = config.task
        self._index = to_device(trie, space, task.score_norm, facts.device, task.quota)
        self._segments: tuple[EligibleTrie, Tensor] | None = None
        self._widths: tuple[int, ...] = ()
        if config.task.generate is not None:
            self._widths = config.task.generate.widths(trie.depth)

    def prepare(self, users: UserBatch) -> Prepared:
        """Prompts and packs of a shard; users whose prompt cannot be built are in no pack."""
        prompts = self._prompts.build(users)
        usable = np.ones(users.num_users, dtype=bool)
        usable[[r.user for r in prompts.rejections]] = False
        nodes = np.zeros(users.num_users, dtype=np.int64)
        if users.candidates is not None:
            nodes += tree_rows(self._trie, users.candidates)
            if self._config.task.generate is None:
                usable &= users.candidates.lengths > 0  # nothing to do for them
        rows = nodes.copy()
        if self._widths:
            rows += rows_per_prompt(self._index, self._widths)
        kept = np.flatnonzero(usable)
        budget = PackingBudget(
            self._config.engine.max_batch_tokens, self._config.engine.max_batch_users
        )
        packs = [kept[p] for p in pack_users(prompts.lengths[kept], rows[kept], budget)]
        return Prepared(users=users, prompts=prompts, tree_rows=nodes, packs=packs)

    @torch.inference_mode()
    def run(self, prepared: Prepared, pack: Ints) -> BatchResult:
        """Everything the task asks for about the users of one pack, numbered as in `pack`."""
        users = prepared.users.take(pack)
        max_rows = self._config.engine.max_batch_tokens
        candidates = users.candidates if self._config.task.score is not None else None
        max_nodes = 0
        if candidates is not None:
            max_nodes += min(int(prepared.tree_rows[pack].sum()), max_rows)
        if self._widths:
            max_nodes += rows_per_prompt(self._index, self._widths) * users.num_users
        packed = prepared.prompts.pack(pack, self._soft_vectors(users))
        context = self._backend.prefill(packed, max_nodes)

        rows = packed.lengths.copy()
        naive = np.zeros(users.num_users, dtype=np.int64)
        prompt_rows = prepared.prompts.lengths[pack]
        failed = np.zeros(users.num_users, dtype=bool)
        scored = generated = None
        if candidates is not None:
            scores, tree_rows = score_in_parts(
                self._backend, context, self._index, candidates, max_rows
            )
            scored = _item_scores(candidates, scores)
            rows += tree_rows
            failed[scored.user[~np.isfinite(scored.score)]] = True
            naive += candidates.lengths * (prompt_rows + self._trie.depth)
        if self._config.task.generate is not None:
            generated, beams_failed, beam_rows_used = self._generate(
                context, users, self._config.task.generate
            )
            failed |= beams_failed
            rows += beam_rows_used
            naive += generated.width * (prompt_rows + self._trie.depth - 1)
        return BatchResult(
            num_users=users.num_users,
            scored=scored,
            generated=generated,
            failed=failed,
            rows=rows,
            rows_naive=naive,
        )

    def close(self) -> None:
        """Free the device."""
        self._backend.close()

    def _eligible(
        self, eligibility: Eligibility | None
    ) -> tuple[EligibleTrie | None, SegmentMask | None]:
        """The trie as the batch's segments see it; propagated once for all packs of a shard."""
        if eligibility is None:
            return None, None
        device = self._index.device
        if self._segments is None or self._segments[0].eligible is not eligibility.eligible:
            trie = EligibleTrie(self._trie, eligibility.eligible)
            self._segments = (trie, torch.from_numpy(trie.alive).to(device))
        trie, alive = self._segments
        return trie, SegmentMask(alive, torch.from_numpy(eligibility.segment).to(device))

    def _load_projector(self) -> UserProjector | None:
        folder = self._config.engine.projector
        if folder is None or not self._config.prompt.parsed.uses("user_vector"):
            return None
        facts = self._backend.facts
        projector = load_projector(folder, facts.device)
        if facts.hidden_size and projector.spec.output_dim != facts.hidden_size:
            raise EngineError(
                "the projector does not fit the model",
                expected=f"output_dim {facts.hidden_size} (the model's hidden size)",
                got=f"output_dim {projector.spec.output_dim}",
                where=folder,
            )
        return projector

    def _soft_vectors(self, users: UserBatch) -> Tensor | None:
        if users.vectors is None:
            return None
        vectors = torch.from_numpy(users.vectors).to(self._backend.facts.device)
        return self._projector(vectors) if self._projector else vectors

    def _generate(
        self, context: Context, users: UserBatch, settings: GenerateSettings
    ) -> tuple[SidBeams, np.ndarray, Ints]:
        """Beams of all users; with `exact`, again and wider for those not certified."""
        device = self._index.device
        eligible, segments = self._eligible(users.eligibility)
        dead = None
        if users.excluded is not None and len(users.excluded.values):
            keys = dead_nodes(self._trie, users.excluded, users.eligibility, eligible)
            dead = torch.from_numpy(keys).to(device)
        everyone = np.arange(users.num_users, dtype=np.int64)

        def search(rows: Ints, widths: tuple[int, ...]) -> Beams:
            prompts = torch.from_numpy(rows).to(device)
            some = max(1, _MAX_SLOTS // most_slots(self._index, widths))
            parts = [
                beam_search(
                    self._backend,
                    context,
                    self._index,
                    prompts=part,
                    widths=widths,
                    k=min(self._config.task.k, self._trie.num_sids),
                    dead=dead,
                    segments=segments,
                )
                for part in (prompts[at : at + some] for at in range(0, len(prompts), some))
            ]
            return join_beams(parts)

        widths = self._widths
        beams = search(everyone, widths)
        result = _HostBeams(beams, users.num_users, max(widths))
        open_rows = result.uncertified()
        while settings.exact and len(open_rows) and min(widths) < settings.max_width:
            widths = tuple(min(2 * max(w, 1), settings.max_width) for w in widths)
            result.replace(open_rows, search(open_rows, widths), max(widths))
            open_rows = result.uncertified()
        return result.beams(), result.failed, result.rows


class _HostBeams:
    """Beams of a batch on the host, some of them replaced by wider searches."""

    def __init__(self, beams: Beams, num_users: int, width: int) -> None:
        self._sid = beams.sid.cpu().numpy().copy()
        self._score = beams.score.float().cpu().numpy().copy()
        self._pruned = beams.pruned.float().cpu().numpy().copy()
        self._mass = beams.legal_mass.float().cpu().numpy()
        self.failed = beams.failed.cpu().numpy().copy()
        self.rows = np.full(num_users, beams.rows, dtype=np.int64)
        self._width = np.full(num_users, width, dtype=np.int64)

    def uncertified(self) -> Ints:
        """Users whose worst result does not beat what was dropped, or who lack results for it."""
        worst = self._score[:, -1]  # -inf when there are fewer than k
        certified = (worst > self._pruned) | (self._pruned == -np.inf)
        return np.flatnonzero(~certified & ~self.failed).astype(np.int64)

    def replace(self, users: Ints, beams: Beams, width: int) -> None:
        """Take a wider search's answer for `users`."""
        self._sid[users] = beams.sid.cpu().numpy()
        self._score[users] = beams.score.float().cpu().numpy()
        self._pruned[users] = beams.pruned.float().cpu().numpy()
        self.failed[users] |= beams.failed.cpu().numpy()
        self.rows[users] += beams.rows
        self._width[users] = width

    def beams(self) -> SidBeams:
        """Flat results, users in order, best first."""
        user, place = np.nonzero(self._score > -np.inf)
        return SidBeams(
            user=user.astype(np.int64),
            sid=self._sid[user, place],
            score=self._score[user, place],
            pruned=self._pruned,
            legal_mass=self._mass,
            width=self._width,
        )


def _item_scores(candidates: Ragged, scores: Tensor) -> ItemScores:
    return ItemScores(
        user=candidates.row_ids, item=candidates.values, score=scores.float().cpu().numpy()
    )


@contextmanager
def open_engine(config: RunConfig, trie: SidTrie) -> Iterator[Engine]:
    """Start the configured backend and build the engine over it; the device is freed at the end.

    Raises:
        EngineError: whatever kept it from starting, a device out of memory included.
    """
    try:
        backend = create_backend(config.engine)
        engine = Engine(config, trie, backend)
    except NightshelfError:
        raise
    except Exception as err:  # of any of the libraries below; a worker must not end in a traceback
        raise EngineError(
            "the engine cannot start",
            got=f"{type(err).__name__}: {err}",
            where=f"backend {config.engine.backend}, model {config.engine.model}",
            do="Out of memory: use a smaller model or dtype, or fewer workers on the device.",
        ) from err
    try:
        yield engine
    finally:
        engine.close()

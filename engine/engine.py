"""The engine: one process, one device, one backend, and the algorithms over it.

`Engine.prepare` builds a shard's prompts and packs its users; `Engine.run` takes one pack through
prefill, and scoring, labelling and generation over that same prefill; `Engine.embed` ends at the
prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from engine.backend import Backend, Context
from engine.backends.checked import checked, forwarded
from engine.backends.registry import create_backend
from engine.generate.beam_step import SegmentMask
from engine.generate.native_beams import NativeBackend, search_natively, uses_native_beams
from engine.generate.search import rows_per_prompt
from engine.generate.widening import search
from engine.packing.cutting import Cutter
from engine.packing.packs import PackingBudget
from engine.packing.preparation import Prepared, pack_distinct, same_work
from engine.prompts.builder import PromptBuilder
from engine.prompts.labels import LabelReader
from engine.prompts.projector import UserProjector, load_projector
from engine.prompts.tokenizer import Tokenizer, bind_space, load_tokenizer
from engine.scoring.items import score_in_parts, unsound
from engine.scoring.labels import label_items
from engine.trees.candidate_trees import CandidateTrees, without_forbidden
from engine.trees.device_trie import DeviceTrie, to_device
from engine.trees.exclusions import EligibleTrie, dead_nodes
from engine.trees.sid_trie import SidTrie
from schemas.errors import EngineError, NightshelfError, is_panic
from schemas.requests import (
    BatchResult,
    CandidateSets,
    Eligibility,
    Ints,
    ItemScores,
    NativeBeams,
    SidBeams,
    UserBatch,
)
from schemas.semantic_ids import ItemTokens, TextTokens
from schemas.settings import GenerateSettings, RunConfig

_ROWS = 8192  # packed together where memory says nothing
_OUT_OF_MEMORY = "out of memory"  # as CUDA and TensorRT-LLM say it without a type of its own


class Engine:
    """Scores and generates for batches of users. Build it with `open_engine`."""

    def __init__(self, config: RunConfig, trie: SidTrie | None, backend: Backend) -> None:
        self._config = config
        self._backend = backend = checked(backend)
        tokenizer = load_tokenizer(config)
        facts = backend.facts
        tokens = _item_tokens(config, trie, tokenizer, facts.vocab_size)
        if tokens is not None and tokens.max_token_id >= facts.vocab_size:
            raise EngineError(
                "the model has no embedding for some semantic-ID tokens",
                expected=f"ids below {facts.vocab_size}",
                got=f"id {tokens.max_token_id}",
            )
        wanted = config.engine.max_batch_tokens
        self._max_rows = (facts.rows_that_fit or _ROWS) if wanted == "auto" else wanted
        self._cutter = Cutter(facts.device)
        self._label: LabelReader | None = None
        if config.task.label is not None:
            self._label = LabelReader(config.task.label, tokenizer, facts.vocab_size)
        deep = (trie.depth if trie else 0) + (len(self._label.suffix) if self._label else 0)
        if config.prompt.max_tokens + deep > facts.max_positions:
            raise EngineError(
                "prompts may be longer than the model's positions",
                expected=f"prompt.max_tokens + {deep} <= {facts.max_positions}",
                got=f"prompt.max_tokens {config.prompt.max_tokens}",
                do=f"Set prompt.max_tokens to at most {facts.max_positions - deep}.",
            )
        self._projector = self._load_projector()
        num_soft = self._projector.spec.num_tokens if self._projector else 1
        self._prompts = PromptBuilder(config.prompt, tokenizer, tokens, trie, num_soft)
        task = config.task
        self._maybe_index: DeviceTrie | None = None
        self._maybe_trees: CandidateTrees | None = None
        if trie is not None and tokens is not None:
            more = len(self._label.suffix) if self._label else 0
            self._maybe_trees = CandidateTrees(
                trie, forward_leaves=self._label is not None, more=more
            )
            self._maybe_index = to_device(trie, tokens, task.score_norm, facts.device, task.quota)
        self._segments: tuple[EligibleTrie, Tensor] | None = None
        self._widths: tuple[int, ...] = ()
        if task.generate is not None:
            self._widths = task.generate.widths(config.space.num_levels)
        self._native = trie is not None and uses_native_beams(config, trie, backend)
        if self._native:
            assert isinstance(backend, NativeBackend), "uses_native_beams checked it"
            backend.start_beams(
                width=self._widths[0],
                steps=self._trie.depth,
                prompt_tokens=config.prompt.max_tokens,
            )

    @property
    def _index(self) -> DeviceTrie:
        assert self._maybe_index is not None, "a task that needs no items asked for them"
        return self._maybe_index

    @property
    def _trees(self) -> CandidateTrees:
        assert self._maybe_trees is not None, "a task that needs no items asked for them"
        return self._maybe_trees

    @property
    def _trie(self) -> SidTrie:
        return self._index.trie

    def prepare(self, users: UserBatch) -> Prepared:
        """Prompts and packs of a shard; users whose prompt cannot be built are in no pack."""
        prompts = self._prompts.build(users)
        labels = None
        if self._label is not None:
            labels = self._label.read(users.labels, users.num_users)
        usable = np.ones(users.num_users, dtype=bool)
        usable[[r.user for r in prompts.rejections]] = False
        usable[[r.user for r in labels.rejections] if labels else []] = False
        nodes = np.zeros(users.num_users, dtype=np.int64)
        candidate_tokens, shared_tree = nodes, None
        if users.candidates is not None:
            nodes, shared_tree = self._trees.rows(users.candidates)
            candidate_tokens = self._trees.tokens(users.candidates)
            if self._config.task.generate is None:
                usable &= users.candidates.scorable > 0  # nothing to do for the others
        rows = nodes.copy()
        if self._widths:
            rows += rows_per_prompt(self._index, self._widths)
        same_as = same_work(users, prompts, labels, usable, items=self._config.task.embed is None)
        budget = PackingBudget(self._max_rows, self._config.engine.max_batch_users)
        packs = pack_distinct(prompts.lengths, rows, usable, same_as, budget)
        self._cutter.forget()
        return Prepared(
            users=users,
            prompts=prompts,
            labels=labels,
            tree_rows=nodes,
            cost=prompts.lengths + rows,
            candidate_tokens=candidate_tokens,
            shared_tree=shared_tree,
            same_as=same_as,
            packs=packs,
            shared_prefix=len(prompts.static_prefix) if self._backend.facts.shares_prefix else 0,
        )

    def run(self, prepared: Prepared, pack: Ints) -> BatchResult:
        """Everything the task asks for about the users of one pack, numbered as in `pack`.

        A pack that does not fit in the device's memory is cut in two.
        """
        parts = self._cutter.cut(self._run_distinct, prepared, pack, self._max_rows)
        return BatchResult.join(parts)

    def _run_distinct(self, prepared: Prepared, pack: Ints, max_rows: int) -> BatchResult:
        """Users whose work is the same are run once."""
        distinct, of = np.unique(prepared.same_as[pack], return_inverse=True)
        if len(distinct) == len(pack):
            return self._run(prepared, pack, max_rows)
        return self._run(prepared, distinct, max_rows).spread(of.reshape(-1))

    @torch.inference_mode()
    def _run(self, prepared: Prepared, pack: Ints, max_rows: int) -> BatchResult:
        users = prepared.users.take(pack)
        candidates = users.candidates if self._config.task.uses_candidates else None
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
        scored = generated = native = None
        if candidates is not None:
            scored, tree_rows = self._score(context, prepared, pack, candidates, max_rows)
            rows += tree_rows
            naive += candidates.lengths * prompt_rows + prepared.candidate_tokens[pack]
            scored = without_forbidden(scored, users)
            labels = prepared.labels.of_user.lengths[pack] if prepared.labels else None
            failed[scored.user[unsound(scored, labels)]] = True
        if self._config.task.generate is not None:
            generated, beams_failed, beam_rows_used, native = self._generate(
                context, users, self._config.task.generate, max_rows
            )
            failed |= beams_failed
            rows += beam_rows_used
            naive += generated.width * (prompt_rows + self._trie.depth - 1)
        sent = forwarded(context)
        return BatchResult(
            num_users=users.num_users,
            scored=scored,
            generated=generated,
            failed=failed,
            rows=rows if sent is None else sent,
            rows_naive=naive,
            native=native,
        )

    @property
    def embedding_width(self) -> int:
        """Numbers of an embedding."""
        return self._backend.facts.embedding_width

    def embed(self, prepared: Prepared, pack: Ints) -> np.ndarray:
        """Embeddings of the users of one pack `[users, hidden]` float32; cut in two like `run`."""
        parts = self._cutter.cut(self._embed, prepared, pack, self._max_rows)
        return np.concatenate(parts)

    @torch.inference_mode()
    def _embed(self, prepared: Prepared, pack: Ints, max_rows: int) -> np.ndarray:
        del max_rows  # a prompt is never cut
        settings = self._config.task.embed
        assert settings is not None, "the task does not embed"
        pack, of = np.unique(prepared.same_as[pack], return_inverse=True)
        users = prepared.users.take(pack)
        packed = prepared.prompts.pack(pack, self._soft_vectors(users))
        out = self._backend.embed(packed, settings.pooling)
        if settings.normalize:
            out = torch.nn.functional.normalize(out, dim=-1)
        return out.cpu().numpy()[of.reshape(-1)]

    def _score(
        self,
        context: Context,
        prepared: Prepared,
        pack: Ints,
        candidates: CandidateSets,
        max_rows: int,
    ) -> tuple[ItemScores, Ints]:
        """Scores, or labels, of all candidates; and the nodes forwarded per user."""
        task = self._config.task
        lists = candidates.lists()
        tree = self._trees.of_pack(prepared.shared_tree, candidates)
        if task.label is None:
            assert task.score is not None, "a task with candidates scores or labels them"
            scores, rows = score_in_parts(
                self._backend,
                context,
                self._index,
                lists,
                max_rows,
                tree=tree,
                length_norm=task.score.length_norm,
            )
            return ItemScores(user=lists.row_ids, item=lists.values, score=_host(scores)), rows
        assert self._label is not None, "set up with the task"
        assert prepared.labels is not None, "prepared with the task"
        labels, rows = label_items(
            self._backend,
            context,
            self._index,
            lists,
            prepared.labels.of_user.take(pack),
            prepared.labels.columns,
            suffix=self._label.suffix,
            softmax=task.label.softmax,
            max_rows=max_rows,
            tree=tree,
        )
        every = _host(labels)
        return (
            ItemScores(user=lists.row_ids, item=lists.values, score=every[:, 0], labels=every),
            rows,
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
        self, context: Context, users: UserBatch, settings: GenerateSettings, max_rows: int
    ) -> tuple[SidBeams, np.ndarray, Ints, NativeBeams | None]:
        """Beams of all users; with `exact`, again and wider for those not certified."""
        k = min(self._config.task.k, self._trie.num_sids)
        if self._native:
            beams, failed, counts = search_natively(
                self._backend,
                context,
                self._index,
                width=self._widths[0],
                k=k,
                rescore=settings.rescore,
                compare_users=settings.compare_users,
                max_rows=max_rows,
            )
            steps = self._trie.depth - 1  # tokens that are fed back; the last one is not
            return beams, failed, beams.width * steps, counts
        eligible, segments = self._eligible(users.eligibility)
        dead = None
        if users.excluded is not None and len(users.excluded.values):
            keys = dead_nodes(self._trie, users.excluded, users.eligibility, eligible)
            dead = torch.from_numpy(keys).to(self._index.device)
        beams, failed, rows = search(
            self._backend,
            context,
            self._index,
            settings,
            widths=self._widths,
            k=k,
            dead=dead,
            segments=segments,
        )
        return beams, failed, rows, None


def _item_tokens(
    config: RunConfig, trie: SidTrie | None, tokenizer: Tokenizer, vocab_size: int
) -> ItemTokens | None:
    """What the codes of the trie are to the model; None where no item is ever named."""
    if config.sid is not None:
        return bind_space(config, tokenizer)
    return None if trie is None else TextTokens(vocab_size, trie.depth)


def _host(scores: Tensor) -> np.ndarray:
    return scores.float().cpu().numpy()


@contextmanager
def open_engine(config: RunConfig, trie: SidTrie | None) -> Iterator[Engine]:
    """Start the configured backend and build the engine over it; the device is freed at the end.

    Raises:
        EngineError: whatever kept it from starting, a device out of memory included.
    """
    try:
        backend = create_backend(config.engine)
        engine = Engine(config, trie, backend)
    except BaseException as err:  # of any of the libraries below; a worker must not end in a trace
        if isinstance(err, NightshelfError) or not (isinstance(err, Exception) or is_panic(err)):
            raise
        do = "The message is that of a library: see docs/operations.md, or run nightshelf doctor."
        if isinstance(err, MemoryError | torch.OutOfMemoryError) or _OUT_OF_MEMORY in str(err):
            do = "Use a smaller model or dtype, or fewer workers on the device."
        raise EngineError(
            "the engine cannot start",
            got=f"{type(err).__name__}: {err}",
            where=f"backend {config.engine.backend}, model {config.engine.model}",
            do=do,
        ) from err
    try:
        yield engine
    finally:
        engine.close()

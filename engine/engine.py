"""The engine: one process, one device, one backend, and the tasks over it.

`Engine.prepare` builds a shard's prompts and packs its users; `Engine.run` takes one pack through
the prefill and every task behind it; `Engine.embed` ends at the prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.backend import Backend
from engine.backends.checked import checked, forwarded
from engine.backends.registry import create_backend
from engine.decoding import Decoding
from engine.packing.cutting import Cutter
from engine.packing.preparation import Preparation, Prepared
from engine.prompts.projector import UserProjector, load_projector
from engine.prompts.tokenizer import load_tokenizer
from engine.tasks import tasks_of
from engine.tasks.embed import Embed
from engine.tasks.task import Answer, Pass, Runner, Setup
from engine.trees.device_trie import DeviceTrie, to_device
from engine.trees.sid_trie import SidTrie
from schemas.errors import EngineError, NightshelfError, is_panic
from schemas.requests import BatchResult, Ints, UserBatch
from schemas.search_work import SearchWork
from schemas.settings import RunConfig

_OUT_OF_MEMORY = "out of memory"  # as CUDA and TensorRT-LLM say it without a type of its own


class Engine:
    """Runs the tasks of a configuration for batches of users. Build it with `open_engine`."""

    def __init__(self, config: RunConfig, trie: SidTrie | None, backend: Backend) -> None:
        self._backend = backend = checked(backend)
        facts = backend.facts
        self._projector = _projector_of(config, backend)
        num_soft = self._projector.spec.num_tokens if self._projector else 1
        tokenizer = load_tokenizer(config)
        tasks = tasks_of(config)
        readers = (task.label_reader(tokenizer, facts.vocab_size) for task in tasks)
        labels = next((reader for reader in readers if reader is not None), None)
        self._preparation = Preparation(
            config, trie, tokenizer, facts, labels=labels, num_soft=num_soft
        )
        self._cutter = Cutter(facts.device)
        self._index: DeviceTrie | None = None
        tokens, task = self._preparation.tokens, config.task
        if trie is not None and tokens is not None:
            self._index = to_device(trie, tokens, task.score_norm, facts.device, task.quota)
        self._embed_task = next((task for task in tasks if isinstance(task, Embed)), None)
        self._runners: list[Runner] = []
        if self._embed_task is None:
            setup = Setup(backend=backend, index=self._items, preparation=self._preparation)
            self._runners = [task.start(setup) for task in tasks]

    @property
    def _items(self) -> DeviceTrie:
        assert self._index is not None, "lists are made of items"
        return self._index

    @property
    def embedding_width(self) -> int:
        """Numbers of an embedding."""
        return self._backend.facts.embedding_width

    def prepare(self, users: UserBatch) -> Prepared:
        """Prompts and packs of a shard; users whose prompt cannot be built are in no pack."""
        self._cutter.forget()
        nodes = sum(runner.nodes_per_user for runner in self._runners)
        trees = [r.nodes_per_tree for r in self._runners if r.nodes_per_tree is not None]
        return self._preparation.prepare(users, nodes, max(trees, default=None))

    def run(self, prepared: Prepared, pack: Ints) -> BatchResult:
        """Everything the tasks find for the users of one pack, numbered as in `pack`.

        A pack that does not fit in the device's memory is cut in two.
        """
        parts = self._cutter.cut(self._run_distinct, prepared, pack, self._preparation.max_rows)
        return BatchResult.join(parts)

    def embed(self, prepared: Prepared, pack: Ints) -> np.ndarray:
        """Embeddings of the users of one pack `[users, hidden]` float32; cut in two like `run`."""
        parts = self._cutter.cut(self._embed, prepared, pack, self._preparation.max_rows)
        return np.concatenate(parts)

    def close(self) -> None:
        """Free the device."""
        self._backend.close()

    def _run_distinct(self, prepared: Prepared, pack: Ints, max_rows: int) -> BatchResult:
        """Users whose work is the same are run once."""
        distinct, of = np.unique(prepared.same_as[pack], return_inverse=True)
        if len(distinct) == len(pack):
            return self._run(prepared, pack, max_rows)
        return self._run(prepared, distinct, max_rows).spread(of.reshape(-1))

    def prefill(self, prepared: Prepared, pack: Ints, nodes: int) -> Decoding:
        """The prompts of a pack, forwarded, with room for so many nodes behind them."""
        vectors = self._soft_vectors(prepared.users.take(pack))
        context = self._backend.prefill(prepared.prompts.pack(pack, vectors), nodes)
        return Decoding(self._backend, context, self._items)

    @torch.inference_mode()
    def _run(self, prepared: Prepared, pack: Ints, max_rows: int) -> BatchResult:
        """The prefill of a pack and every task behind it."""
        users = prepared.users.take(pack)
        nodes = sum(runner.most_nodes(prepared, pack, max_rows) for runner in self._runners)
        decoding = self.prefill(prepared, pack, nodes)
        one = Pass(decoding=decoding, prepared=prepared, pack=pack, users=users, max_rows=max_rows)
        answers: list[Answer] = []
        for runner in self._runners:
            answers.append(runner.run(replace(one, scored=answers[-1].scored if answers else None)))
        sent = forwarded(decoding.context)
        if sent is None:
            tokens = prepared.prompts.lengths[pack] - len(prepared.prompts.static_prefix)
            sent = np.sum([tokens, *(answer.nodes for answer in answers)], axis=0)
        return BatchResult(
            num_users=users.num_users,
            scored=next((a.scored for a in answers if a.scored is not None), None),
            generated=next((a.generated for a in answers if a.generated is not None), None),
            failed=np.any([answer.failed for answer in answers], axis=0),
            rows=sent,
            rows_naive=np.sum([answer.naive for answer in answers], axis=0),
            native=next((a.native for a in answers if a.native is not None), None),
            search=SearchWork.total([answer.search for answer in answers]),
        )

    @torch.inference_mode()
    def _embed(self, prepared: Prepared, pack: Ints, max_rows: int) -> np.ndarray:
        del max_rows  # a prompt is never cut
        assert self._embed_task is not None, "the run gives lists"
        pack, of = np.unique(prepared.same_as[pack], return_inverse=True)
        users = prepared.users.take(pack)
        packed = prepared.prompts.pack(pack, self._soft_vectors(users))
        return self._embed_task.run(self._backend, packed).cpu().numpy()[of.reshape(-1)]

    def _soft_vectors(self, users: UserBatch) -> Tensor | None:
        if users.vectors is None:
            return None
        vectors = torch.from_numpy(users.vectors).to(self._backend.facts.device)
        return self._projector(vectors) if self._projector else vectors


def _projector_of(config: RunConfig, backend: Backend) -> UserProjector | None:
    folder, facts = config.engine.projector, backend.facts
    if folder is None or not config.prompt.parsed.uses("user_vector"):
        return None
    projector = load_projector(folder, facts.device)
    if facts.hidden_size and projector.spec.output_dim != facts.hidden_size:
        raise EngineError(
            "the projector does not fit the model",
            expected=f"output_dim {facts.hidden_size} (the model's hidden size)",
            got=f"output_dim {projector.spec.output_dim}",
            where=folder,
        )
    return projector


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

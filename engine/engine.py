"""The engine: one process, one device, one backend, and the tasks over it.

`Engine.prepare` builds a shard's prompts and packs its users; `Engine.run` takes one pack through
the prefill and every task behind it; `Engine.embed` ends at the prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
from engine.tasks.generate import Generate
from engine.tasks.score import Label, Score
from engine.tasks.task import Pass, Setup, Task
from engine.trees.device_trie import DeviceTrie, to_device
from engine.trees.sid_trie import SidTrie
from schemas.errors import EngineError, NightshelfError, is_panic
from schemas.requests import BatchResult, Ints, UserBatch
from schemas.settings import RunConfig

_OUT_OF_MEMORY = "out of memory"  # as CUDA and TensorRT-LLM say it without a type of its own


class Engine:
    """Runs the tasks of a configuration for batches of users. Build it with `open_engine`."""

    def __init__(self, config: RunConfig, trie: SidTrie | None, backend: Backend) -> None:
        self._config = config
        self._backend = backend = checked(backend)
        facts = backend.facts
        self._projector = _projector_of(config, backend)
        num_soft = self._projector.spec.num_tokens if self._projector else 1
        tokenizer = load_tokenizer(config)
        self._preparation = Preparation(config, trie, tokenizer, facts, num_soft)
        self._cutter = Cutter(facts.device)
        self._index: DeviceTrie | None = None
        tokens, task = self._preparation.tokens, config.task
        if trie is not None and tokens is not None:
            self._index = to_device(trie, tokens, task.score_norm, facts.device, task.quota)
        self._tasks, self._nodes_per_user = self._start_tasks()

    def _start_tasks(self) -> tuple[list[Task], int]:
        """The tasks of the run, and the nodes per user that do not hang on its candidates."""
        settings, found = self._config.task, list[Task]()
        if settings.score is not None:
            found.append(Score(settings.score, self._preparation))
        if settings.label is not None:
            found.append(Label(settings.label, self._preparation))
        if settings.generate is None:
            return found, 0
        assert self._index is not None, "a run that generates has a catalog"
        setup = Setup(config=self._config, backend=self._backend, index=self._index)
        generate = Generate(settings.generate, setup)
        return [*found, generate], generate.nodes_per_user

    @property
    def embedding_width(self) -> int:
        """Numbers of an embedding."""
        return self._backend.facts.embedding_width

    def prepare(self, users: UserBatch) -> Prepared:
        """Prompts and packs of a shard; users whose prompt cannot be built are in no pack."""
        self._cutter.forget()
        return self._preparation.prepare(users, self._nodes_per_user)

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

    @torch.inference_mode()
    def _run(self, prepared: Prepared, pack: Ints, max_rows: int) -> BatchResult:
        """The prefill of a pack and every task behind it."""
        assert self._index is not None, "lists are made of items"
        users = prepared.users.take(pack)
        packed = prepared.prompts.pack(pack, self._soft_vectors(users))
        nodes = sum(task.most_nodes(prepared, pack, max_rows) for task in self._tasks)
        context = self._backend.prefill(packed, nodes)
        decoding = Decoding(self._backend, context, self._index)
        one = Pass(decoding=decoding, prepared=prepared, pack=pack, users=users, max_rows=max_rows)
        answers = [task.run(one) for task in self._tasks]
        sent = forwarded(context)
        if sent is None:
            sent = np.sum([packed.lengths, *(answer.nodes for answer in answers)], axis=0)
        return BatchResult(
            num_users=users.num_users,
            scored=next((a.scored for a in answers if a.scored is not None), None),
            generated=next((a.generated for a in answers if a.generated is not None), None),
            failed=np.any([answer.failed for answer in answers], axis=0),
            rows=sent,
            rows_naive=np.sum([answer.naive for answer in answers], axis=0),
            native=next((a.native for a in answers if a.native is not None), None),
        )

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

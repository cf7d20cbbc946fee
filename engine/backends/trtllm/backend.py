"""The production backend: a Qwen3, or another decoder, inside NVIDIA TensorRT-LLM.

Its encode engine forwards a prompt with many chains of tree nodes behind it in one packed request,
which supplies `extend` without state: nodes are noted on the host, and what is read is sent, prompt
and all. So the same scoring, labels and trie-constrained beams run here as over the torch backend,
and are as exact.

With our plug-in (engine/backends/trtllm/qwen3_plugin.py) the engine gives hidden states: they are
kept, so that a tree is forwarded once whatever is read from it, and the head is applied to the rows
that are read. Without it, it gives logits, nothing is kept, and each read sends its chains again.

Its own beam search is a second engine, started on request (`start_beams`).
"""

from __future__ import annotations

import contextlib
import logging
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from engine.backend import BackendFacts, NodeBatch, Norm, PackedPrompts, Targets, TokenColumns
from engine.backends.torch.head import Head
from engine.backends.trtllm.beam_engine import BeamEngine, Hypotheses
from engine.backends.trtllm.checkpoint import (
    PreparedFolder,
    placeholder_id,
    read_checkpoint,
)
from engine.backends.trtllm.context import TrtllmContext
from engine.backends.trtllm.encode_engine import EncodeEngine, as_prompt
from engine.backends.trtllm.errors import running
from engine.backends.trtllm.heads import head_of, log_probs_of_logits
from engine.backends.trtllm.library import Library, load_library
from engine.backends.trtllm.memory import plan_beams, plan_encode
from engine.backends.trtllm.packing import Call, plan_calls
from engine.backends.trtllm.self_test import check_beams, run_self_test
from schemas.errors import EngineError
from schemas.requests import Ints
from schemas.settings import EngineSettings, Pooling

log = logging.getLogger("nightshelf.trtllm")
_PACKS = 4  # encode calls that a pack of users may take: their prompts and nodes are only noted


class TrtllmBackend:
    """See engine/backend.py for the contract."""

    def __init__(self, library: Library, settings: EngineSettings) -> None:
        self._library, self._settings = library, settings
        self._checkpoint = read_checkpoint(settings)
        self._plugin = self._wants_plugin()
        self._beams: BeamEngine | None = None
        self._prepared: PreparedFolder | None = None
        self._placeholder: int | None = None
        self._encoder: EncodeEngine | None = None
        self._head: Head | None = None  # over the engine's own weights; None: it gives logits
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._start()
            undo.pop_all()

    def _start(self) -> None:
        settings, checkpoint = self._settings, self._checkpoint
        folder = checkpoint.folder
        if self._plugin:
            self._placeholder = placeholder_id(checkpoint, settings)
            self._prepared = PreparedFolder(folder, self._placeholder)
            folder = self._prepared.path
            _import_plugin(self._library)
        plan = plan_encode(checkpoint, settings, _total_memory(), head=not self._plugin)
        self._encoder = EncodeEngine(
            self._library, settings, checkpoint, plan, folder, plugin=self._plugin
        )
        if self._plugin:
            self._head = self._find_head()
        test = run_self_test(
            self._encoder,
            checkpoint.vocab_size,
            settings.dtype,
            self._all_log_probs,
            multi_item=settings.trtllm.multi_item == "auto",
        )
        self.refused = test.refused  # why multi-item prompts are not in use; None: they are
        self._multi_item = test.refused is None
        if test.refused is not None:
            log.warning("one prompt per item instead of multi-item prompts: %s", test.refused)
        self._facts = BackendFacts(
            name="trtllm",
            vocab_size=checkpoint.vocab_size,
            hidden_size=checkpoint.sizes.hidden,
            embedding_width=checkpoint.sizes.hidden,
            # A prompt with one chain and its two delimiters must fit into a packed prompt.
            max_positions=min(checkpoint.max_positions, plan.max_seq_len - 2),
            dtype=checkpoint.quantised or settings.dtype,
            device=test.device,
            shares_prefix=False,
            stateless=True,
            rows_that_fit=_PACKS * plan.max_num_tokens,
        )

    def _wants_plugin(self) -> bool:
        """Whether our model class stands in for the checkpoint's.

        Raises:
            EngineError: soft tokens need it, and it cannot.
        """
        trtllm = self._settings.trtllm
        why = None
        if trtllm.plugin == "off":
            why = "engine.trtllm.plugin is off"
        elif not self._checkpoint.has_plugin:
            why = f"the plug-in is for Qwen3ForCausalLM, not {self._checkpoint.architecture}"
        if why is not None and self._settings.projector is not None:
            raise EngineError(
                "user vectors need our plug-in inside TensorRT-LLM",
                got=why,
                do="Use a Qwen3 on one GPU, or engine.backend: torch.",
            )
        return why is None

    @property
    def facts(self) -> BackendFacts:
        """Sizes, precision and device."""
        return self._facts

    @property
    def uses_multi_item(self) -> bool:
        """Whether many items stand behind one prompt, or the self-test decided otherwise."""
        return self._multi_item

    @property
    def takes_vectors(self) -> bool:
        """Whether soft tokens may stand in prompts."""
        return self._plugin

    @property
    def beams_take_vectors(self) -> bool:
        """Whether they may also where native beams search."""
        return self._placeholder is not None

    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> TrtllmContext:
        """Note the prompts. They are forwarded with what is first read behind them."""
        if prompts.soft_vectors is not None and not self._plugin:
            raise EngineError(
                "user vectors need our plug-in inside TensorRT-LLM",
                got=f"model {self._checkpoint.architecture}",
                do="Use a Qwen3 on one GPU, or engine.backend: torch.",
            )
        return TrtllmContext(prompts, self._facts.device)

    def extend(self, context: TrtllmContext, nodes: NodeBatch) -> None:
        """Note the nodes."""
        context.append(nodes)

    @torch.inference_mode()
    def log_probs(
        self, context: TrtllmContext, rows: Tensor, targets: Targets, norm: Norm
    ) -> Tensor:
        """Log-probabilities of targets at rows. Rows without a real target are not sent."""
        asked = rows.cpu().numpy()
        needed = np.zeros(len(asked), dtype=bool)
        real = targets.row if targets.real is None else targets.row[targets.real]
        needed[real.cpu().numpy()] = True
        if self._head is not None:
            if not needed.any():
                return torch.zeros(len(targets.row), device=rows.device)
            for call in self._calls(context, context.to_read(asked, asked[needed])):
                context.keep(call.rows, self._engine.read(context, call))
            return self._head.log_probs(context.hidden(rows), targets, norm)
        return self._log_probs_by_call(context, asked, needed, targets, norm)

    @torch.inference_mode()
    def embed(self, prompts: PackedPrompts, pooling: Pooling) -> Tensor:
        """Hidden states behind the final norm, pooled per prompt `[B, hidden]` float32."""
        if self._head is None:
            raise EngineError(
                "embeddings need our plug-in inside TensorRT-LLM, for hidden states",
                got=f"model {self._checkpoint.architecture}, plug-in not in use",
                do="Use a Qwen3 on one GPU with engine.trtllm.plugin: auto, or the torch backend.",
            )
        context = self.prefill(prompts, 0)
        out = torch.empty((context.num_prompts, self._facts.hidden_size), device=self._facts.device)
        for call in self._calls(context, np.arange(context.num_prompts, dtype=np.int64)):
            tokens = self._engine.read_all(context, call)
            for request, hidden in zip(call.requests, tokens, strict=True):
                rows = hidden.float()
                out[request.prompt] = rows[-1] if pooling == "last" else rows.mean(dim=0)
        return out

    def start_beams(self, *, width: int, steps: int, prompt_tokens: int) -> None:
        """Start the engine's own beam search: `width` beams of `steps` tokens behind prompts of at
        most `prompt_tokens`. A second copy of the weights goes to the device.

        Raises:
            EngineError: it does not fit, does not start, or scores its beams wrongly.
        """
        if self._settings.projector is not None and self._placeholder is None:
            raise EngineError(
                "every id of the vocabulary is a token, so none can stand for a soft token",
                expected="an embedding with more rows than the tokenizer has tokens",
                where=self._checkpoint.folder,
                do="Set engine.trtllm.placeholder_id to the id of a token that no prompt contains, "
                "or use task.generate.mode: constrained.",
            )
        plan = plan_beams(self._checkpoint, width, steps, prompt_tokens, _total_memory())
        folder = self._prepared.path if self._prepared else self._checkpoint.folder
        if self._beams is not None:  # of another width
            self._beams.close()
        self._beams = BeamEngine(self._library, self._settings, plan, folder, self._placeholder)
        check_beams(
            self._beams,
            self._engine,
            min(prompt_tokens, plan.max_num_tokens),
            self._checkpoint.vocab_size,
            self._facts.device,
            self._settings.dtype,
            self._all_log_probs,
        )

    def native_beams(self, context: TrtllmContext) -> Hypotheses:
        """The engine's own beams behind every prompt, as they come."""
        assert self._beams is not None, "start_beams comes first"
        return self._beams.search(context)

    def close(self) -> None:
        """End the engines."""
        for engine in (self._beams, self._encoder):
            if engine is not None:
                engine.close()
        self._beams = self._encoder = self._head = None
        if self._prepared is not None:
            self._prepared.close()

    @property
    def _engine(self) -> EncodeEngine:
        assert self._encoder is not None, "the backend is closed"
        return self._encoder

    def _calls(self, context: TrtllmContext, rows: Ints) -> list[Call]:
        return plan_calls(context, rows, self._engine.budget, multi_item=self._multi_item)

    def _log_probs_by_call(
        self,
        context: TrtllmContext,
        asked: Ints,
        needed: np.ndarray,
        targets: Targets,
        norm: Norm,
    ) -> Tensor:
        """Logits of a call are read before the next call: never more than one call's are held."""
        device = targets.row.device
        out = torch.zeros(len(targets.row), device=device)
        place = np.full(context.num_rows, -1, dtype=np.int64)
        for call in self._calls(context, np.unique(asked[needed])):
            logits = self._engine.read(context, call)
            place.fill(-1)
            place[call.rows] = np.arange(len(call.rows))
            row = torch.from_numpy(place[asked]).to(device)[targets.row]
            here = row >= 0
            some = Targets(
                row=row[here],
                column=targets.column[here],
                columns=targets.columns,
                real=None if targets.real is None else targets.real[here],
            )
            out[here] = log_probs_of_logits(logits, some, norm).to(device)
        return out

    @torch.inference_mode()
    def probe(self, tokens: Ints) -> Tensor:
        """log p of every token behind each of `tokens`, one plain prompt `[tokens, vocab]`."""
        with running("encode a probe"):
            rows = self._engine.encode([as_prompt(tokens, None)])[0]
        return self._all_log_probs(rows)

    def _all_log_probs(self, rows: Tensor) -> Tensor:
        """log p of every token from rows of the encode engine's output, for the self-test."""
        if self._head is None:
            return torch.log_softmax(rows.float(), dim=-1)
        every = np.arange(self._checkpoint.vocab_size, dtype=np.int64)
        column = torch.arange(len(every), device=rows.device).repeat(len(rows))
        row = torch.arange(len(rows), device=rows.device).repeat_interleave(len(every))
        targets = Targets(row=row, column=column, columns=TokenColumns(every))
        log_probs = self._head.log_probs(rows, targets, Norm("full_vocab"))
        return log_probs.view(len(rows), len(every))

    def _find_head(self) -> Head:
        from engine.backends.trtllm.qwen3_plugin import loaded_head

        found = loaded_head()
        if found is None:
            raise EngineError(
                "the model's head cannot be applied on demand",
                expected="a head in plain floats, loaded in this process",
                got=f"quantisation {self._checkpoint.quantised}",
                do="Set engine.trtllm.plugin: off.",
            )
        weight, bias = found
        return head_of(weight, bias, self._checkpoint.vocab_size)


def _import_plugin(library: Library) -> None:
    """Register our model class.

    Raises:
        EngineError: this build has moved what the class is made of.
    """
    try:
        import_module("engine.backends.trtllm.qwen3_plugin")  # registers itself
    except (ImportError, AttributeError, TypeError) as err:
        raise EngineError(
            "the plug-in does not fit this TensorRT-LLM",
            got=f"version {library.version}: {type(err).__name__}: {err}",
            do="Set engine.trtllm.plugin: off (no user vectors, no embeddings), or use a version "
            "that docs/trtllm.md names.",
        ) from err


def _total_memory() -> int | None:
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def create_backend(settings: EngineSettings) -> TrtllmBackend:
    """Start TensorRT-LLM on the device of this process.

    Raises:
        EngineError: it is not installed, the model cannot be used, or the engine does not start.
    """
    library = load_library()
    return TrtllmBackend(library, settings)

"""The embedded default: a Hugging Face causal LM in PyTorch, on CPU or CUDA, with our attention and
head.

The model's body stays the library's (norms, rotary embedding, MLP); we hand it packed rows and
their positions, and it calls `token_tree_attention` in each layer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.backend import BackendFacts, NodeBatch, Norm, PackedPrompts, Targets
from engine.backends.torch.code_paths import choose
from engine.backends.torch.context import PrefixKV, TorchContext
from engine.backends.torch.fused_layers import use_fused_layers
from engine.backends.torch.head import Head
from engine.backends.torch.head_transform import head_transform
from engine.backends.torch.memory import rows_that_fit
from engine.backends.torch.model import (
    head_of,
    load_model,
    longest_position,
    own_attention,
    reference_log_probs,
    sizes_of,
)
from engine.backends.torch.passes import PrefixPass, TreePass, node_passes, prompt_passes
from engine.backends.torch.prepacked import prepack_layers
from engine.backends.torch.probe import TOLERANCE, largest_error, make_probe, read
from engine.checkpoints.architecture import has_window
from engine.device import no_gpu
from engine.row_tiles import pad_rows
from schemas.errors import EngineError
from schemas.requests import Ints
from schemas.settings import EngineSettings, Pooling

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LAYERS = 4  # that tell one architecture from another; some differ in every fourth


class TorchBackend:
    """See engine/backend.py for the contract."""

    def __init__(
        self, folder: str, dtype: str, device: torch.device, *, layers: int | None = None
    ) -> None:
        """`layers`: of the model, from the first, with all that makes bfloat16 fast; None: all."""
        if layers is None and (dtype != "float32" or has_window(folder)):
            self._check_architecture(folder, device)
        self._model = load_model(folder, _DTYPES[dtype], device, layers=layers)
        self._shortened = layers is not None
        self._body = self._model.base_model
        self._embed = self._model.get_input_embeddings()
        self._path = path = choose(device, _DTYPES[dtype], sizes_of(self._model).head_dim)
        self._skips = False  # whether the last layer forwards what is read behind it and no more
        self._head = Head(
            head_of(self._model, folder),
            independent=path.independent,
            log_sum=None if path.compiled is None else path.compiled.log_sum,
            prepack=path.prepack,
            transform=head_transform(self._model.config.get_text_config()),
        )
        self._prefixes: dict[bytes, PrefixKV] = {}
        config = self._model.config.get_text_config()
        weight = self._embed.weight
        assert isinstance(weight, Tensor), "an embedding has a weight"
        vocab_size, hidden_size = weight.shape
        self._facts = BackendFacts(
            name="torch",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            embedding_width=hidden_size,
            max_positions=longest_position(config),
            dtype=dtype,
            device=device,
            rows_that_fit=self._rows_that_fit(),
            code_path=path.described,
        )
        try:
            self._probe(folder)
        except EngineError:
            raise
        except Exception as err:  # whatever an unknown architecture trips over
            raise own_attention(self._model, folder, err) from err

    @staticmethod
    def _check_architecture(folder: str, device: torch.device) -> None:
        """The first layers in float32: rounding hides nothing there, and a window would show.

        Raises:
            EngineError: they do not score as the library's do.
        """
        TorchBackend(folder, "float32", device, layers=_LAYERS).close()

    def _rows_that_fit(self) -> int | None:
        device = next(self._model.parameters()).device
        if device.type != "cuda":
            return None
        total = torch.cuda.get_device_properties(device).total_memory
        weights = sum(p.numel() * p.element_size() for p in self._model.parameters())
        return rows_that_fit(sizes_of(self._model), total, weights)

    @property
    def facts(self) -> BackendFacts:
        """Sizes, precision and device."""
        return self._facts

    @torch.inference_mode()
    def prefill(self, prompts: PackedPrompts, max_nodes: int) -> TorchContext:
        """Forward packed prompts; keep KV per prompt and the hidden state of each prompt end."""
        context, hidden = self._forward_prompts(prompts, max_nodes, ends_only=True)
        context.hidden[: prompts.num_prompts] = hidden
        return context

    @torch.inference_mode()
    def embed(self, prompts: PackedPrompts, pooling: Pooling) -> Tensor:
        """Hidden states behind the final norm, pooled per prompt `[B, hidden]` float32."""
        context, hidden = self._forward_prompts(prompts, 0, ends_only=pooling == "last")
        if pooling == "last":
            return hidden.float()
        # Sums row after row inside a prompt, so that its neighbours cannot change its bits.
        total = torch.segment_reduce(hidden.float(), "sum", lengths=context.lengths, axis=0)
        if context.prefix.hidden_sum is not None:
            total = total + context.prefix.hidden_sum
        return total / (context.lengths + context.prefix.length)[:, None]

    def _forward_prompts(
        self, prompts: PackedPrompts, max_nodes: int, ends_only: bool
    ) -> tuple[TorchContext, Tensor]:
        """A context with the prompts' KV, and the last hidden state of each token `[T, hidden]`, or
        of the last one of each prompt `[B, hidden]`.
        """
        prefix = self._prefix(prompts.static_prefix)
        position = np.arange(len(prompts.token_ids))
        position -= np.repeat(prompts.offsets[:-1], prompts.lengths)
        positions = self._put(position + prefix.length)
        context = TorchContext(
            prompts.lengths,
            self._facts.device,
            prefix,
            self._facts.hidden_size,
            max_nodes,
            _DTYPES[self._facts.dtype],
            self._path.flash,
        )
        embedded = self._embed(self._put(prompts.token_ids))
        if prompts.soft_vectors is not None:
            embedded[self._put(prompts.soft_positions)] = prompts.soft_vectors.to(embedded)
        hidden = [
            self._forward(embedded[part.rows], positions[part.rows], part)
            for part in prompt_passes(
                context, prompts.offsets, self._path.independent, ends_only and self._skips
            )
        ]
        found = torch.cat(hidden)
        if ends_only and not self._skips:
            found = found[self._put(prompts.offsets[1:] - 1)]
        return context, found

    @torch.inference_mode()
    def extend(self, context: TorchContext, nodes: NodeBatch) -> None:
        """Forward nodes at the positions behind their prompt; append KV and hidden states."""
        num_nodes = len(nodes.token)
        context.reserve(num_nodes)
        first = context.num_nodes
        parent = nodes.parent - context.num_prompts
        context.parent[first : first + num_nodes] = parent.clamp(min=-1)
        position = context.lengths[nodes.prompt] + context.prefix.length + nodes.depth - 1
        for part in node_passes(context, nodes, self._path.independent):
            hidden = self._forward(self._embed(nodes.token[part.nodes]), position[part.nodes], part)
            context.hidden[context.num_rows + part.nodes] = hidden
        context.num_nodes += num_nodes

    @torch.inference_mode()
    def log_probs(
        self, context: TorchContext, rows: Tensor, targets: Targets, norm: Norm
    ) -> Tensor:
        """Log-probabilities of targets at rows."""
        return self._head.log_probs(context.hidden[rows], targets, norm)

    def close(self) -> None:
        """Drop the model and its caches."""
        self._prefixes.clear()
        del self._model, self._body, self._embed, self._head
        if self._facts.device.type == "cuda":
            torch.cuda.empty_cache()

    def _put(self, array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._facts.device)

    def _forward(self, embedded: Tensor, positions: Tensor, tree_pass: TreePass) -> Tensor:
        num_rows = len(embedded)
        if self._path.independent:
            embedded, positions = pad_rows(embedded), pad_rows(positions)
        out = self._body(
            inputs_embeds=embedded[None],
            position_ids=positions[None],
            use_cache=False,
            tree_pass=tree_pass,
        )
        hidden: Tensor = out.last_hidden_state[0, :num_rows]
        return hidden

    def _prefix(self, tokens: Ints) -> PrefixKV:
        """The KV of a static prefix, forwarded the first time it is asked for."""
        key = tokens.tobytes()
        if key not in self._prefixes:
            prefix = PrefixKV()
            if len(tokens):
                positions = torch.arange(len(tokens), device=self._facts.device)
                tree_pass = PrefixPass(prefix, len(tokens), self._path.independent)
                hidden = self._forward(self._embed(self._put(tokens)), positions, tree_pass)
                prefix.hidden_sum = hidden.float().sum(dim=0)
            prefix.length = len(tokens)
            self._prefixes[key] = prefix
        return self._prefixes[key]

    def _make_fast(self) -> None:
        if self._shortened or self._path.fused:
            compiled = None if self._shortened else self._path.compiled
            steps = None if compiled is None else compiled.steps
            self._skips = use_fused_layers(self._body, steps)
        if self._path.prepack is not None:
            prepack_layers(self._body, self._path.prepack)

    @torch.inference_mode()
    def _probe(self, folder: str) -> None:
        """Hold prefill, extend and head against the library (engine/backends/torch/probe.py).

        Catches what a name check cannot: a head that is not known, another attention.
        """
        probe = make_probe(self._facts.vocab_size, self._facts.max_positions)
        want = reference_log_probs(self._model, *map(self._put, probe.paths))
        want = want[:, self._put(probe.columns)]
        if want.isnan().any():
            if self._shortened:
                return  # the whole model says it, of its own precision
            raise EngineError(
                "the model's own library gets NaN from this checkpoint",
                expected="log-probabilities of every token",
                got=f"NaN in {self._facts.dtype}",
                where=folder,
                do="Weights are NaN or infinite, or overflow in this precision: save it again.",
            )
        self._make_fast()  # after the library had its say
        error = largest_error(read(self, probe), want, self._facts.dtype)
        self._prefixes.clear()
        if not error <= TOLERANCE[self._facts.dtype]:
            raise EngineError(
                "the model does not score as its own library does",
                expected=f"a difference of at most {TOLERANCE[self._facts.dtype]:.2%} of the "
                "logits' size",
                got=f"{error:.2%}" + self._head.described,
                where=folder,
                do="This architecture is not supported by the torch backend; please report it.",
            )


def create_backend(settings: EngineSettings) -> TorchBackend:
    """Load the checkpoint of the settings on the device they name.

    Raises:
        EngineError: no such device, or the model cannot be used.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise no_gpu()
    use_cuda = settings.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    assert settings.model is not None, "checked by the configuration"
    return TorchBackend(settings.model, settings.dtype, device)

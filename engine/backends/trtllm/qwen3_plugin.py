"""Our Qwen3 inside TensorRT-LLM: soft tokens for both engines, and hidden states for `encode`.

Importing this registers the model class and its input processor, which is all that an out-of-tree
model has to do; TensorRT-LLM's own file is not touched. The checkpoint must name the class
(engine/backends/trtllm/checkpoint.py, `PreparedFolder`).

Two routes lead vectors into a prompt. `LLM.encode` passes tensors straight to `forward`
(engine/backends/trtllm/tensor_route.py). `LLM.generate` has none: vectors travel as
`multi_modal_embeddings`, in shared memory and without pickle, and stand where the prompt has the
placeholder token.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from tensorrt_llm._torch.models.modeling_multimodal_utils import (
    find_input_mm_embeds,
    fuse_input_embeds,
)
from tensorrt_llm._torch.models.modeling_qwen3 import Qwen3ForCausalLM
from tensorrt_llm._torch.models.modeling_utils import register_auto_model
from tensorrt_llm.inputs.registry import (
    BaseMultimodalInputProcessor,
    MultimodalPlaceholderMetadata,
    register_input_processor,
)
from torch import Tensor

from engine.backends.trtllm.checkpoint import ARCHITECTURE
from engine.backends.trtllm.tensor_route import (
    HIDDEN_ONLY,
    MODALITY,
    SOFT_POSITIONS,
    SOFT_VECTORS,
    TOKEN_IDS,
)

# What the runners pass along and the layers below do not know.
_OF_THE_RUNNER = ("seq_lens", "multi_item_part_lens", "text_token_indices", "mm_token_indices")
_loaded: list[weakref.ref[Any]] = []


class SoftTokenInput(BaseMultimodalInputProcessor):  # type: ignore[misc]  # the library has no types
    """Turns a request with vectors into token ids and what stands at its placeholders.

    The prompt arrives as token ids: nothing is tokenised here and no tokenizer is needed.
    """

    supports_token_id_mm_expansion = True

    def __init__(
        self,
        model_path: str,
        config: Any,
        tokenizer: Any,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        self._model_path = model_path
        self._config = config
        self._tokenizer = tokenizer
        self._placeholder = int(config.nightshelf_placeholder_id)

    @property
    def processor(self) -> None:
        """Vectors come ready: nothing is processed."""
        return

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer, or None."""
        return self._tokenizer

    @property
    def config(self) -> Any:
        """The checkpoint's configuration."""
        return self._config

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        dtype = getattr(self._config, "dtype", None) or getattr(self._config, "torch_dtype", None)
        return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16

    def __call__(self, inputs: Any, sampling_params: Any) -> tuple[list[int], None]:
        """A request without vectors: its token ids as they are."""
        return list(inputs[TOKEN_IDS]), None

    def call_with_text_prompt(self, inputs: Any, sampling_params: Any) -> tuple[list[int], None]:
        """The same under the name it has in later versions."""
        return self(inputs, sampling_params)

    def attach_multimodal_embeddings(
        self, inputs: Any, multimodal_embedding: dict[str, list[Tensor]], sampling_params: Any
    ) -> tuple[list[int], dict[str, Any]]:
        """The request's token ids, and its vectors, one per placeholder among them."""
        vectors = torch.cat(multimodal_embedding[MODALITY])
        token_ids = list(inputs[TOKEN_IDS])
        if token_ids.count(self._placeholder) != len(vectors):
            raise ValueError(
                f"{len(vectors)} soft tokens for {token_ids.count(self._placeholder)} placeholders"
            )
        return token_ids, {"multimodal_data": {"multimodal_embedding": vectors}}

    _attach_multimodal_embeddings_impl = attach_multimodal_embeddings

    def get_vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self._config.vocab_size)

    def get_mm_token_ids(self) -> Tensor:
        """The placeholder: without this, tokens outside the vocabulary would be meant."""
        return torch.tensor([self._placeholder])

    def get_mm_special_token_ids(self) -> None:
        """No token frames a vector."""
        return


@register_input_processor(
    SoftTokenInput,
    model_type="nightshelf_qwen3",
    placeholder_metadata=MultimodalPlaceholderMetadata(
        placeholder_map={MODALITY: "<nightshelf_user>"}
    ),
)
@register_auto_model(ARCHITECTURE)
class NightshelfQwen3ForCausalLM(Qwen3ForCausalLM):  # type: ignore[misc]  # the library has no types
    """Qwen3 whose input may hold vectors and whose output may be hidden states."""

    def __init__(self, model_config: Any) -> None:
        super().__init__(model_config)
        placeholder = int(model_config.pretrained_config.nightshelf_placeholder_id)
        self.multimodal_token_ids = torch.tensor([placeholder])
        self.mm_token_ids = self.multimodal_token_ids
        _loaded.append(weakref.ref(self))

    @property
    def multimodal_data_device_paths(self) -> list[str]:
        """What of a request's data goes to the device."""
        return ["multimodal_embedding"]

    def forward(
        self,
        attn_metadata: Any,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        return_context_logits: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Logits as the base class gives them, or the hidden states `[tokens, hidden]` of all."""
        indices = {name: kwargs.pop(name, None) for name in _OF_THE_RUNNER}
        hidden_only = kwargs.pop(HIDDEN_ONLY, False)
        positions, vectors = kwargs.pop(SOFT_POSITIONS, None), kwargs.pop(SOFT_VECTORS, None)
        params = kwargs.pop("multimodal_params", None) or []
        if vectors is not None:
            embedded = self.model.embed_tokens(input_ids)
            inputs_embeds = embedded.index_copy(0, positions, vectors.to(embedded))
            input_ids = None
        else:
            params = [p for p in params[: attn_metadata.num_contexts] if _vectors_of(p) is not None]
            if params:
                input_ids, inputs_embeds = self._fused(attn_metadata, input_ids, params, indices)
        if hidden_only:
            hidden: Tensor = self.model(
                attn_metadata=attn_metadata,
                input_ids=input_ids,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
            )
            return hidden
        logits: Tensor = super().forward(
            attn_metadata=attn_metadata,
            input_ids=input_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_context_logits=return_context_logits,
            **kwargs,
        )
        return logits

    def _fused(
        self, attn_metadata: Any, input_ids: Any, params: list[Any], indices: dict[str, Any]
    ) -> Any:
        """Embeddings with the requests' vectors at the placeholders of their prompts.

        Only tokens of prompts count: a beam may generate the placeholder's id, and then means it.
        """
        text, places = indices["text_token_indices"], indices["mm_token_indices"]
        if text is None or places is None:
            here = torch.isin(input_ids, self.mm_token_ids.to(input_ids))
            here[attn_metadata.num_ctx_tokens :] = False
            text, places = torch.where(~here)[0], torch.where(here)[0]
        return fuse_input_embeds(
            self.model.embed_tokens,
            input_ids,
            find_input_mm_embeds([_vectors_of(p) for p in params], params),
            mm_token_ids=self.mm_token_ids,
            text_token_indices=text,
            mm_token_indices=places,
        )


def _vectors_of(params: Any) -> Any:
    """The vectors of a request, None where it has none."""
    data = params.multimodal_data
    return None if not data else data.get("multimodal_embedding")


def loaded_head() -> tuple[Tensor, Tensor | None] | None:
    """Weight `[vocab, hidden]` and bias of the newest model of this process; None: no such model,
    or a head whose weights are not plain floats."""
    model = next((m for ref in reversed(_loaded) if (m := ref()) is not None), None)
    if model is None:
        return None
    weight, bias = model.lm_head.weight, getattr(model.lm_head, "bias", None)
    return (
        (weight, bias) if weight.dtype in (torch.float32, torch.bfloat16, torch.float16) else None
    )

"""Decoders: the library's interface over transformers' own model and an explicit mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tensorrt_llm._torch.models.modeling_utils import register_auto_model

_KNOWN = ("seq_lens", "multi_item_part_lens", "mrope_config", "spec_metadata", "resource_manager")


class Qwen3Model(nn.Module):
    """The body: hidden states behind the final norm `[tokens, hidden]`."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.embed_tokens = body.get_input_embeddings()

    def forward(
        self, attn_metadata, input_ids=None, position_ids=None, inputs_embeds=None, **kwargs
    ):
        for name in kwargs:  # later versions hand them to the layers, which do not know them
            if name not in _KNOWN:
                raise TypeError(f"forward() got an unexpected keyword argument {name!r}")
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError(
                "You cannot specify both input_ids and inputs_embeds at the same time, and must "
                "specify either one"
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        attn_metadata.embedded = inputs_embeds
        out = self.body(
            inputs_embeds=attn_metadata.poisoned(inputs_embeds)[None],
            attention_mask=attn_metadata.additive_mask(inputs_embeds.dtype),
            position_ids=position_ids,
            use_cache=False,
        )
        return out.last_hidden_state[0]


class _Decoder(nn.Module):
    """`model`, `lm_head`, and logits of the last token of each sequence, or of every token."""

    def __init__(self, model_config: Any) -> None:
        super().__init__()
        folder, dtype = model_config.folder, model_config.dtype
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True
        ).eval()
        self.model_config = model_config
        self.model = Qwen3Model(loaded.base_model)
        self.lm_head = loaded.get_output_embeddings()

    def forward(
        self,
        attn_metadata,
        input_ids=None,
        position_ids=None,
        inputs_embeds=None,
        return_context_logits=False,
        **kwargs,
    ):
        hidden = self.model(
            attn_metadata=attn_metadata,
            input_ids=input_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        if not return_context_logits:
            hidden = hidden[torch.tensor(attn_metadata.seq_lens).cumsum(0) - 1]
        return self.lm_head(hidden).float()


@register_auto_model("Qwen3ForCausalLM")
class Qwen3ForCausalLM(_Decoder):
    """What a plug-in extends."""


@register_auto_model("LlamaForCausalLM")
class LlamaForCausalLM(_Decoder):
    """A decoder that no plug-in of ours extends."""

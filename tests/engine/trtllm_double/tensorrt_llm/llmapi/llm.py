"""LLM: an encode engine or a generating one, never both."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from tensorrt_llm import beams, contract
from tensorrt_llm._torch.models.modeling_utils import get_model_architecture
from tensorrt_llm.executor.result import RequestOutput
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.inputs.multimodal import MultimodalParams
from tensorrt_llm.inputs.registry import create_input_processor
from tensorrt_llm.llmapi.llm_args import KvCacheConfig
from tensorrt_llm.metadata import AttentionMetadata, BlockCache
from tensorrt_llm.recorder import FAULTS, record
from tensorrt_llm.sampling_params import SamplingParams

_RESERVED = ("input_ids", "seq_lens", "attn_metadata", "return_context_logits")
_MOST_BEAM_STORE = 1 << 32  # bytes; a machine would be out of memory
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": "auto"}


@dataclass
class EncoderOutput:
    """One prompt's outputs."""

    logits: torch.Tensor
    prompt_token_ids: list[int]
    prompt: str | None = None


def _disordered(outputs: list[Any]) -> list[Any]:
    """Outputs as a build with a fault gives them."""
    if "outputs_reversed" in FAULTS and len(outputs) > 1:
        return outputs[::-1]
    if "output_missing" in FAULTS and len(outputs) > 1:
        return outputs[:-1]
    if "output_doubled" in FAULTS and len(outputs) > 1:
        return [*outputs, outputs[-1]]
    return outputs


class LLM:
    """See the package. Arguments and their defaults are the contract's."""

    def __init__(self, model, tokenizer=None, **kwargs: Any) -> None:
        record("LLM", model=model, **kwargs)
        fields = contract.constructor("LLM")
        for name in kwargs:
            if name not in fields:
                raise ValueError(f"LLM got invalid argument: {name}")
        self.args = SimpleNamespace(**(fields | kwargs))
        if "kv_cache_config" not in kwargs:
            self.args.kv_cache_config = KvCacheConfig()
        if self.args.sampler_type == "TRTLLMSampler":
            raise ValueError("sampler_type='TRTLLMSampler' was removed")
        if self.args.encode_only and self.args.mm_encoder_only:
            raise ValueError("encode_only and mm_encoder_only are mutually exclusive")
        config = transformers.AutoConfig.from_pretrained(model, local_files_only=True)
        longest = config.max_position_embeddings
        self._max_seq_len = self.args.max_seq_len or longest
        if self._max_seq_len > longest:
            raise ValueError(f"max_seq_len {self._max_seq_len} > the model's {longest}")
        store = self.args.max_batch_size * self.args.max_beam_width * self._max_seq_len * 24
        if self.args.max_beam_width > 1 and store > _MOST_BEAM_STORE:
            raise torch.OutOfMemoryError(f"the beam store takes {store / 2**30:.0f} GiB")
        self._tokenizer = None if self.args.skip_tokenizer_init else tokenizer or object()
        self._processor = create_input_processor(
            str(model), self._tokenizer, self.args.checkpoint_format
        )
        made_of = SimpleNamespace(
            folder=str(model), dtype=_DTYPES[self.args.dtype], pretrained_config=config
        )
        self._model = get_model_architecture(config)[0](made_of)
        self._vocab_size = config.vocab_size
        self._cache = BlockCache() if self.args.kv_cache_config.enable_block_reuse else None
        self._ids = count()
        self._closed = False

    def __getstate__(self):
        raise RuntimeError("LLM object can not be pickled.")

    def shutdown(self) -> None:
        """End it."""
        self._closed = True

    # -- encode ------------------------------------------------------------------------------

    @torch.inference_mode()
    def encode(
        self,
        inputs,
        add_special_tokens=True,
        batch_indexed_model_output=True,
        copy_logits_to_host=True,
        return_raw_logits=False,
        **model_kwargs: Any,
    ):
        """One packed forward pass."""
        record(
            "encode",
            inputs=inputs,
            batch_indexed_model_output=batch_indexed_model_output,
            copy_logits_to_host=copy_logits_to_host,
            model_kwargs=model_kwargs,
        )
        if not self.args.encode_only:
            raise RuntimeError("encode() requires encode_only=True.")
        if self._closed:
            raise RuntimeError("LLM is shut down or not initialized.")
        if not isinstance(inputs, list) or isinstance(inputs[0], int):
            return self.encode([inputs], add_special_tokens, batch_indexed_model_output)[0]
        if len(inputs) > self.args.max_batch_size:
            raise ValueError(f"Batch size ({len(inputs)}) exceeds max_batch_size")
        tokens, part_lens = self._checked(inputs)
        model_kwargs = {k: v for k, v in model_kwargs.items() if k not in _RESERVED}
        if model_kwargs and self.args.cuda_graph_config is not None:
            raise NotImplementedError("LLM.encode(..., **model_kwargs) with encoder CUDA graphs")
        if "dies" in FAULTS and sum(map(len, tokens)) > 60:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        lengths = [len(t) for t in tokens]
        metadata = AttentionMetadata(lengths, part_lens or None)
        out = self._model.forward(
            attn_metadata=metadata,
            input_ids=torch.tensor([t for one in tokens for t in one]),
            position_ids=metadata.position_ids(),
            return_context_logits=not batch_indexed_model_output,
            seq_lens=lengths,
            **({"multi_item_part_lens": part_lens} if part_lens else {}),
            **model_kwargs,
        )
        if return_raw_logits:
            return out
        if batch_indexed_model_output:
            return [EncoderOutput(out[i], t) for i, t in enumerate(tokens)]
        if part_lens and "delimiter_shift" in FAULTS:
            out = out.roll(1, dims=0)
        return _disordered(
            [EncoderOutput(rows, t) for rows, t in zip(out.split(lengths), tokens, strict=True)]
        )

    def _checked(self, inputs) -> tuple[list[list[int]], list[list[int]]]:
        tokens, part_lens = [], []
        for one in inputs:
            one = {"prompt_token_ids": one} if isinstance(one, list) else one
            if "prompt_token_ids" not in one:
                raise TypeError(f"Unsupported input type: {type(one)}")
            ids, parts = one["prompt_token_ids"], one.get("multi_item_part_lens")
            if parts is not None:
                if len(parts) < 2:
                    raise ValueError('"multi_item_part_lens" must have at least two elements')
                if sum(parts) + len(parts) != len(ids):
                    raise ValueError('"multi_item_part_lens" inconsistent with prompt length')
                if max(parts[1:]) >= 1 << 16:
                    raise ValueError("item lengths are 16 bits wide")
                part_lens.append(parts)
            if not all(type(t) is int and 0 <= t < self._vocab_size for t in ids):
                raise ValueError("token ids must be ints of the vocabulary")
            tokens.append(ids)
        total = sum(map(len, tokens))
        if total > self.args.max_num_tokens:
            raise ValueError(f"Total tokens ({total}) across the batch exceeds max_num_tokens")
        if max(map(len, tokens)) > self._max_seq_len:
            raise ValueError("Max sequence length exceeds max_seq_len")
        if part_lens and len(part_lens) != len(tokens):
            raise ValueError(
                '"multi_item_part_lens" must either be provided for all prompts or for none'
            )
        if part_lens and (self.args.attn_backend != "FLASHINFER" or "multi_item_refused" in FAULTS):
            raise ValueError(
                f"{self.args.attn_backend} Attention does not support multi-item scoring"
            )
        return tokens, part_lens

    # -- generate ----------------------------------------------------------------------------

    @torch.inference_mode()
    def generate(
        self, inputs, sampling_params=None, use_tqdm=True, lora_request=None, cache_salt=None
    ):
        """Beams, or one greedy continuation, per prompt."""
        record(
            "generate",
            inputs=inputs,
            sampling_params=sampling_params,
            use_tqdm=use_tqdm,
            cache_salt=cache_salt,
        )
        if self.args.encode_only:
            raise RuntimeError("generate_async() is not available when encode_only=True.")
        if self._closed:
            raise RuntimeError("LLM is shutting down")
        params = sampling_params or SamplingParams()
        salts = cache_salt if isinstance(cache_salt, list) else [cache_salt] * len(inputs)
        prepared = [self._preprocess(one, params) for one in inputs]
        for ids, _ in prepared:
            self._admit(ids, params)
        return _disordered(
            [
                self._one(ids, data, params, salt)
                for (ids, data), salt in zip(prepared, salts, strict=True)
            ]
        )

    def _preprocess(self, one, params) -> tuple[list[int], MultimodalParams | None]:
        if params.end_id is None and self._tokenizer is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if isinstance(one, list):
            one = {"prompt_token_ids": one}
        if "multi_item_part_lens" in one:
            raise ValueError("Multi-item scoring is only supported via LLM.encode().")
        if "prompt" not in one and "prompt_token_ids" not in one:
            raise TypeError(f"The inputs must be type str or list of int, but got {type(one)}")
        vectors = one.get("multi_modal_embeddings")
        if "prompt_token_ids" in one and vectors is None:
            return list(one["prompt_token_ids"]), None
        if vectors is None:
            return self._processor(one, params)[0], None
        ids, extra = self._processor.attach_multimodal_embeddings(one, vectors, params)
        return ids, MultimodalParams(extra["multimodal_data"])

    def _admit(self, ids: list[int], params: SamplingParams) -> None:
        if len(ids) > self.args.max_num_tokens and not self.args.enable_chunked_prefill:
            raise RequestError("The sum of prompt length, query length should not exceed")
        if params.beam_width != self.args.max_beam_width:
            raise RequestError(
                f"Request beam width {params.beam_width} is not equal to max_beam_width "
                f"{self.args.max_beam_width}. This is not supported!"
            )
        if len(ids) + params.max_tokens > self._max_seq_len:
            raise RequestError("the prompt and its tokens exceed max_seq_len")
        if not all(0 <= t < self._vocab_size for t in ids):
            raise RequestError("Token ID out of range")
        pool = self.args.kv_cache_config.max_tokens
        if pool is not None and pool < len(ids) + params.beam_width * params.max_tokens:
            raise RuntimeError("No free block found")

    def _one(self, ids, data, params, salt) -> RequestOutput:
        def step(histories: list[list[int]]) -> torch.Tensor:
            rows = [ids + history for history in histories]
            cache = None
            if self._cache is not None:
                cache = self._cache.of(salt, ids, len(rows))
            metadata = AttentionMetadata([len(r) for r in rows], cache=cache)
            return self._model.forward(
                attn_metadata=metadata,
                input_ids=torch.tensor([t for r in rows for t in r]),
                position_ids=metadata.position_ids(),
                **self._vectors(ids, histories, data),
            )

        return RequestOutput(
            next(self._ids), None, ids, beams.search(step, params, ids)[: params.n]
        )

    def _vectors(self, ids, histories, data) -> dict[str, Any]:
        """Vectors, and where they go: into prompts, whatever a beam has generated since."""
        if data is None:
            return {}
        places = torch.isin(torch.tensor(ids), self._model.mm_token_ids)
        mask = torch.cat([torch.cat([places, places.new_zeros(len(h))]) for h in histories])
        return {
            "multimodal_params": [data] * len(histories),
            "text_token_indices": torch.where(~mask)[0],
            "mm_token_indices": torch.where(mask)[0],
        }

"""Input processors by model class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import transformers

from tensorrt_llm._torch.models.modeling_utils import get_model_architecture

_PROCESSORS: dict[type, type] = {}


@dataclass
class MultimodalPlaceholderMetadata:
    """How placeholders of a modality are written in a prompt's text."""

    placeholder_map: dict[str, str]
    placeholder_placement: Any = "AFTER_TEXT"
    placeholders_separator: str = "\n"


class BaseMultimodalInputProcessor(ABC):
    """Abstract in what either version of upstream leaves abstract."""

    @property
    @abstractmethod
    def processor(self): ...

    @property
    @abstractmethod
    def tokenizer(self): ...

    @property
    @abstractmethod
    def config(self): ...

    @property
    @abstractmethod
    def dtype(self): ...

    @abstractmethod
    def __call__(self, inputs, sampling_params): ...

    @abstractmethod
    def call_with_text_prompt(self, inputs, sampling_params): ...

    def attach_multimodal_embeddings(self, inputs, multimodal_embedding, sampling_params):
        raise NotImplementedError("Input processor does not support multimodal embedding input")

    def get_vocab_size(self):
        return int(self.config.vocab_size)

    def get_mm_token_ids(self):
        return None

    def get_mm_special_token_ids(self):
        return None


class DefaultInputProcessor:
    """Text and token ids, nothing else."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, inputs, sampling_params):
        raise ValueError("tokenizer is required to tokenize string prompt")


def register_input_processor(processor_cls, model_type, placeholder_metadata=None):
    """Decorator of a model class."""

    def wrapper(model_cls):
        if placeholder_metadata is None:
            raise ValueError(
                f"A valid placeholder_metadata must be provided but got {placeholder_metadata}"
            )
        _PROCESSORS[model_cls] = processor_cls
        return model_cls

    return wrapper


def create_input_processor(model_path_or_dir, tokenizer, checkpoint_format="HF", **kwargs):
    """The registered processor of the checkpoint's class, else the default one."""
    if checkpoint_format != "HF":
        return DefaultInputProcessor(tokenizer)
    config = transformers.AutoConfig.from_pretrained(model_path_or_dir, local_files_only=True)
    found = _PROCESSORS.get(get_model_architecture(config)[0])
    if found is None:
        return DefaultInputProcessor(tokenizer)
    return found(model_path_or_dir, config, tokenizer, trust_remote_code=True, **kwargs)

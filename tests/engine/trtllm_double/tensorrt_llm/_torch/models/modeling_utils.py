"""The registry of model classes."""

from __future__ import annotations

from typing import Any

MODEL_CLASS_MAPPING: dict[str, type] = {}


def register_auto_model(name: str):
    """Decorator: the class of an architecture; the last one wins."""

    def decorator(cls):
        MODEL_CLASS_MAPPING[name] = cls
        return cls

    return decorator


def get_model_architecture(config: Any) -> tuple[type, str]:
    """The class of a configuration."""
    if not config.architectures:
        raise RuntimeError("Model architecture is not provided.")
    name = config.architectures[0]
    if name not in MODEL_CLASS_MAPPING:
        raise RuntimeError(f"Unknown model architecture: {name}")
    return MODEL_CLASS_MAPPING[name], name

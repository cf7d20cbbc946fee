"""What a model does to its logits behind the linear head, by its config: a factor, a soft cap.

Only keys that the model's own configuration class knows count: others are ignored by the library
too. Whether they are read rightly is decided at start-up, where the model is held against its
library's own forward (engine/backends/torch/probe.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

_DIVIDES = ("logits_scaling",)  # the Granite family
_MULTIPLIES = ("logit_scale", "output_multiplier")  # Cohere
_MULTIPLIES_INSTEAD = ("hyperclovax",)  # reads the name that Granite divides by
_CAPS = ("final_logit_softcapping", "logits_soft_cap")  # Gemma, nanochat
_OF_THE_HIDDEN_STATE = "dim_model_base"  # MiniCPM divides the state by hidden_size / this


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """`cap * tanh(factor * logits / cap)`; without a cap `factor * logits`."""

    factor: float = 1.0
    cap: float | None = None
    keys: tuple[str, ...] = ()  # of config.json, that it was read from

    def __call__(self, logits: Tensor) -> Tensor:
        """New logits, float32, of the same shape."""
        logits = logits.float()
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.cap is not None:
            logits = (logits / self.cap).tanh() * self.cap
        return logits


def head_transform(config: Any) -> HeadTransform | None:
    """The transform of a model's text configuration; None: its logits are the head's."""
    known = type(config)().to_dict()
    given = {name: getattr(config, name, None) for name in known}
    factor, keys = 1.0, []
    for name in _DIVIDES + _MULTIPLIES:
        value = given.get(name)
        if value is None or value == 1.0:
            continue
        divides = name in _DIVIDES and config.model_type not in _MULTIPLIES_INSTEAD
        factor = factor / float(value) if divides else factor * float(value)
        keys.append(name)
    base = given.get(_OF_THE_HIDDEN_STATE)
    if base is not None:
        factor *= float(base) / float(config.hidden_size)
        keys.append(_OF_THE_HIDDEN_STATE)
    caps = [name for name in _CAPS if given.get(name) is not None]
    if not keys and not caps:
        return None
    cap = float(getattr(config, caps[0])) if caps else None
    return HeadTransform(factor, cap, (*keys, *caps))

"""User vectors to soft tokens: a Linear or two-layer MLP read from safetensors
(Embedding-to-Prefix).

A projector folder holds `projector.json` and `projector.safetensors`:

    {"kind": "linear", "input_dim": D, "output_dim": H, "num_tokens": n}     weight [n*H, D], bias
    [n*H] {"kind": "mlp", …, "hidden_dim": M, "activation": "gelu"}    fc1.weight [M, D], fc1.bias,
    fc2.weight …

Source: Embedding-to-Prefix, arXiv 2505.17051; GLIDE, arXiv 2603.17540.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from engine.prompts.projector_spec import ProjectorSpec, read_projector_spec
from engine.row_tiles import pad_rows
from schemas.errors import EngineError

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu": functional.relu,
}


class UserProjector:
    """Projects `[U, D]` float32 vectors to `[U * num_tokens, H]`, in float32 on the device."""

    def __init__(self, spec: ProjectorSpec, weights: dict[str, Tensor]) -> None:
        self.spec = spec
        self._weights = weights

    def __call__(self, vectors: Tensor) -> Tensor:
        """Soft tokens of each user, one user after another."""
        w, num_users = self._weights, len(vectors)
        vectors = pad_rows(vectors)
        if self.spec.kind == "linear":
            out = functional.linear(vectors, w["weight"], w.get("bias"))
        else:
            hidden = functional.linear(vectors, w["fc1.weight"], w.get("fc1.bias"))
            hidden = _ACTIVATIONS[self.spec.activation](hidden)
            out = functional.linear(hidden, w["fc2.weight"], w.get("fc2.bias"))
        return out[:num_users].view(-1, self.spec.output_dim)


def load_projector(folder: str, device: torch.device) -> UserProjector:
    """Read a projector folder onto the device.

    Raises:
        EngineError: a file is missing, or a tensor has another name or shape than projector.json
        says.
    """
    spec = read_projector_spec(folder)
    path = Path(folder) / "projector.safetensors"
    try:
        weights = load_file(str(path), device=str(device))
    except (OSError, SafetensorError) as err:
        raise EngineError(
            "projector.safetensors cannot be read", got=str(err), where=str(path)
        ) from err
    for name, shape in spec.shapes().items():
        if name not in weights and name.endswith("bias"):
            continue
        got = tuple(weights[name].shape) if name in weights else None
        if got != shape:
            raise EngineError(
                f"projector.safetensors: tensor {name!r} does not fit projector.json",
                expected=f"shape {shape}",
                got=f"shape {got}" if got else f"tensors {', '.join(sorted(weights))}",
                where=str(path),
            )
    return UserProjector(spec, {name: tensor.float() for name, tensor in weights.items()})

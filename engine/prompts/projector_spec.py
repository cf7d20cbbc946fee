"""The files of a projector folder. No torch here: the driver reads `projector.json` when it plans.

`projector.json` and the tensors of `projector.safetensors`, for vectors of length D, model width H:

    {"kind": "linear", "input_dim": D, "output_dim": H, "num_tokens": n}
        weight [n*H, D], bias [n*H]
    {"kind": "mlp", "input_dim": D, "hidden_dim": M, "output_dim": H, "num_tokens": n,
     "activation": "gelu"}
        fc1.weight [M, D], fc1.bias [M], fc2.weight [n*H, M], fc2.bias [n*H]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from schemas.errors import EngineError


class ProjectorSpec(BaseModel):
    """projector.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["linear", "mlp"]
    input_dim: PositiveInt
    output_dim: PositiveInt
    num_tokens: PositiveInt = 1
    hidden_dim: PositiveInt | None = None
    activation: Literal["gelu", "silu", "relu"] = "gelu"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors the weights file must hold; biases may be absent."""
        out = self.num_tokens * self.output_dim
        if self.kind == "linear":
            return {"weight": (out, self.input_dim), "bias": (out,)}
        hidden = self.hidden_dim or 0
        return {
            "fc1.weight": (hidden, self.input_dim),
            "fc1.bias": (hidden,),
            "fc2.weight": (out, hidden),
            "fc2.bias": (out,),
        }


def read_projector_spec(folder: str) -> ProjectorSpec:
    """Read projector.json; `EngineError` when it is missing or wrong."""
    path = Path(folder) / "projector.json"
    try:
        spec = ProjectorSpec.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise EngineError(
            "the projector folder has no projector.json", where=folder, do="See engine.projector."
        ) from None
    except (OSError, ValueError) as err:
        problem = err.errors()[0] if isinstance(err, ValidationError) else None
        got = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" if problem else str(err)
        raise EngineError("projector.json cannot be used", got=got, where=str(path)) from err
    if spec.kind == "mlp" and spec.hidden_dim is None:
        raise EngineError("projector.json lacks hidden_dim, which kind mlp needs", where=str(path))
    return spec

"""The library's layers with fewer passes over memory, for bfloat16 on a CPU.

Matmuls stay as they are. Around them the library writes a float32 tensor for every step of a norm
or a rotary embedding; here the steps of one block of rows are done in place while the block is in
the cache. The formulas are the library's. What is replaced is replaced in the modules of one model,
and only where it is known: a norm that gives what ours gives, and the classes of the models below.
float32 keeps the library's layers. The backend's probe compares the two at start-up.

Legend: T rows, N heads, D head width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.torch_backend.tree_attention import token_tree_attention

_BLOCK = 256  # rows whose float32 copies stay in the cache
_MODELS = ("Qwen3", "Qwen2", "Llama", "Mistral")  # one decoder layer, but for biases and norms
_ATTENTION = {f"{model}Attention" for model in _MODELS}
_MLP = {f"{model}MLP" for model in _MODELS}
_CLOSE = 0.02  # relative; bfloat16 keeps 8 bits


def use_lean_layers(model: nn.Module) -> None:
    """Give the norms, the attention and the gated MLPs of `model` our forward."""
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm") and _is_plain(module):
            weight: Any = module.weight
            lean: Any = partial(_norm, weight=weight, eps=_eps(module))
        elif name in _ATTENTION:
            lean = partial(_attention, module)
        elif name in _MLP and _of(module).config.hidden_act == "silu":
            lean = partial(_mlp, module)
        else:
            continue
        module.forward = lean


def _eps(norm: nn.Module) -> float:
    return float(_of(norm).variance_epsilon)


def _of(module: nn.Module) -> Any:
    """A module of the library's, whose attributes have no types."""
    return module


@torch.inference_mode()
def _is_plain(norm: nn.Module) -> bool:
    """Whether it is `weight * x / rms(x)`: some models add 1 to the weight, or have a bias."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or not hasattr(norm, "variance_epsilon"):
        return False
    x = torch.linspace(-2, 3, weight.numel(), device=weight.device).to(weight.dtype)[None]
    want, got = norm(x).float(), _norm(x, weight=weight, eps=_eps(norm)).float()
    return torch.allclose(got, want, rtol=_CLOSE, atol=1e-6)


def _norm(x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension."""
    wide = x.to(torch.float32, copy=True)
    return _scaled(wide, eps).to(x.dtype).mul_(weight)


def _scaled(wide: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` in place, float32."""
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide.mul_(size.square_().div_(wide.shape[-1]).add_(eps).rsqrt_())


def _mlp(module: Any, x: Tensor) -> Tensor:
    """`down(silu(gate(x)) * up(x))`."""
    gate = functional.silu(module.gate_proj(x), inplace=True)
    out: Tensor = module.down_proj(gate.mul_(module.up_proj(x)))
    return out


def _attention(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Projections, norms of the heads where there are any, rotary embedding and tree attention."""
    shape = (hidden_states.shape[1], -1, module.head_dim)  # [T, N, D]
    q = module.q_proj(hidden_states).view(shape)
    k = module.k_proj(hidden_states).view(shape)
    v = module.v_proj(hidden_states).view(shape)
    cos, sin = (x[0].float()[:, None] for x in position_embeddings)  # [T, 1, D]
    scale = module.scaling  # of the scores, at no cost here
    q = _turned(q, getattr(module, "q_norm", None), cos * scale, sin * scale)
    k = _turned(k, getattr(module, "k_norm", None), cos, sin)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, _ = token_tree_attention(module, q, k, v, attention_mask, scaling=1.0, **kwargs)
    return module.o_proj(out.flatten(2)), None


def _turned(x: Tensor, norm: Any, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `[T, N, D]`, normed and rotated: `x * cos + (-x2, x1) * sin` for halves x1 and x2."""
    half = x.shape[-1] // 2
    weight: Any = None if norm is None else norm.weight.float()
    out = torch.empty_like(x)
    for begin in range(0, len(x), _BLOCK):
        at = slice(begin, begin + _BLOCK)
        wide = x[at].float()
        if norm is not None:
            wide = _scaled(wide, _eps(norm)).mul_(weight)
        turned = wide * cos[at]
        turned[..., :half].addcmul_(wide[..., half:], sin[at, :, :half], value=-1)
        turned[..., half:].addcmul_(wide[..., :half], sin[at, :, half:])
        out[at] = turned
    return out

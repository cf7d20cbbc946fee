"""The library's layers with fewer passes over memory, for bfloat16.

Matmuls stay as they are. Around them the library writes a float32 tensor for every step of a norm
or a rotary embedding. Three functions take their place, `Steps`: on a CPU the steps of one block of
rows are done in place while the block is in the cache; on CUDA each is one kernel (compiled.py).
The last layer forwards of a prompt what is read behind it: keys and values of all its tokens, the
rest of its last token only.
The formulas are the library's. What is replaced is replaced in the modules of one model, and only
where it is known: a norm that gives what ours gives, and the classes of the models below. float32
keeps the library's layers. The backend's probe compares the two at start-up.

Legend: T rows, N heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.backends.torch.passes import PromptPass, TreePass
from engine.backends.torch.tree_attention import token_tree_attention

_BLOCK = 1 << 18  # numbers whose float32 copies stay in the cache
_MODELS = ("Qwen3", "Qwen2", "Llama", "Mistral")  # one decoder layer, but for biases and norms
_ATTENTION = {f"{model}Attention" for model in _MODELS}
_MLP = {f"{model}MLP" for model in _MODELS}
_LAYER = {f"{model}DecoderLayer" for model in _MODELS}
_CLOSE = 0.02  # relative; bfloat16 keeps 8 bits


@dataclass(frozen=True, slots=True)
class Steps:
    """What stands between the matmuls; arithmetic in float32, results in the precision of `x`."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    """`x / rms(x) * weight` over the last dimension; x, weight, eps."""

    turned: Callable[[Tensor, Tensor | None, float, Tensor, Tensor], Tensor]
    """Heads `[T, N, D]`, normed where there is a weight, and rotated by cos and sin `[T, 1, D]`."""

    gated: Callable[[Tensor, Tensor], Tensor]
    """`silu(gate) * up`; may overwrite the gate."""


def use_fused_layers(model: nn.Module, steps: Steps | None = None) -> bool:
    """Give the norms, the attention and the gated MLPs of `model` our forward.

    Behind the last layer a prompt's last token is read and no other. Where that layer is known, it
    forwards no more than that, but for the keys and values; its output has those rows.

    Args:
        steps: None: those for a CPU.

    Returns:
        Whether the last layer is known.
    """
    steps, last = steps or ON_CPU, False
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm") and _is_plain(module):
            ours: Any = partial(_norm_layer, steps, module)
        elif name in _ATTENTION:
            ours = partial(_attention, steps, module)
        elif name in _MLP and _of(module).config.hidden_act == "silu":
            ours = partial(_mlp, steps, module)
        elif name in _LAYER and module is _of(model).layers[-1]:
            ours, last = partial(_last_layer, module), True
        else:
            continue
        module.forward = ours
    return last


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
    want, got = norm(x).float(), _norm(x, weight, _eps(norm)).float()
    return torch.allclose(got, want, rtol=_CLOSE, atol=1e-6)


def _norm_layer(steps: Steps, module: Any, x: Tensor) -> Tensor:
    return steps.norm(x, module.weight, _eps(module))


def _mlp(steps: Steps, module: Any, x: Tensor) -> Tensor:
    """`down(silu(gate(x)) * up(x))`."""
    out: Tensor = module.down_proj(steps.gated(module.gate_proj(x), module.up_proj(x)))
    return out


def _last_layer(
    module: Any, hidden_states: Tensor, tree_pass: TreePass | None = None, **kwargs: Any
) -> Tensor:
    """The library's decoder layer, of the rows that are read behind it."""
    ends = tree_pass.ends if isinstance(tree_pass, PromptPass) else None
    normed = module.input_layernorm(hidden_states)
    attended, _ = module.self_attn(hidden_states=normed, tree_pass=tree_pass, ends=ends, **kwargs)
    hidden = attended + (hidden_states if ends is None else hidden_states[:, ends])
    out: Tensor = hidden + module.mlp(module.post_attention_layernorm(hidden))
    return out


def _attention(
    steps: Steps,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    ends: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Projections, norms of the heads where there are any, rotary embedding and tree attention; of
    all rows, or of those at `ends`.
    """
    heads = (-1, module.head_dim)
    cos, sin = (x[0].float()[:, None] for x in position_embeddings)  # [T, 1, D]
    k = module.k_proj(hidden_states).view(hidden_states.shape[1], *heads)  # [T, H, D]
    v = module.v_proj(hidden_states).view(k.shape)
    k = steps.turned(k, *_norm_of(module, "k_norm"), cos, sin)
    if ends is not None:
        hidden_states, cos, sin = hidden_states[:, ends], cos[ends], sin[ends]
    q = module.q_proj(hidden_states).view(hidden_states.shape[1], *heads)  # [T, N, D]
    scale = module.scaling  # of the scores, at no cost here
    q = steps.turned(q, *_norm_of(module, "q_norm"), cos * scale, sin * scale)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, _ = token_tree_attention(module, q, k, v, attention_mask, scaling=1.0, ends=ends, **kwargs)
    return module.o_proj(out.flatten(2)), None


def _norm_of(module: Any, name: str) -> tuple[Tensor | None, float]:
    """Weight and epsilon of a norm of the heads; models without one have none."""
    norm = getattr(module, name, None)
    return (None, 0.0) if norm is None else (norm.weight, _eps(norm))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    flat = x.flatten(0, -2)
    out = torch.empty_like(flat)
    for at in _blocks(flat):
        out[at] = _scaled(flat[at].to(torch.float32, copy=True), eps)
        out[at].mul_(weight)
    return out.view(x.shape)


def _blocks(x: Tensor) -> Iterator[slice]:
    """Slices of the rows of `x` that stay in the cache."""
    rows = max(1, _BLOCK // max(1, x[:1].numel()))
    return (slice(begin, begin + rows) for begin in range(0, len(x), rows))


def _scaled(wide: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` in place, float32."""
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide.mul_(size.square_().div_(wide.shape[-1]).add_(eps).rsqrt_())


def _turned(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """`x * cos + (-x2, x1) * sin` for halves x1 and x2."""
    half = x.shape[-1] // 2
    if weight is not None:  # it goes into cos and sin, which all heads share
        weight = weight.float()
        cos, sin = cos * weight, sin * weight.roll(half)
    out = torch.empty_like(x)
    for at in _blocks(x):
        wide = x[at].to(torch.float32, copy=True)
        if weight is not None:
            _scaled(wide, eps)
        turned = wide * cos[at]
        turned[..., :half].addcmul_(wide[..., half:], sin[at, :, :half], value=-1)
        turned[..., half:].addcmul_(wide[..., :half], sin[at, :, half:])
        out[at] = turned
    return out


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate, inplace=True).mul_(up)


ON_CPU = Steps(_norm, _turned, _gated)

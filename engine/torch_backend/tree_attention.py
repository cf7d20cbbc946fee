"""Token-tree attention, registered with transformers so that any of its causal LMs runs it.

A node attends three disjoint sets of keys: the static prefix, its own prompt, and its ancestors
with itself. Each set gives a partial softmax, and the partial results are merged by their
log-sum-exp, which is exact. The prompt's keys are read once for all nodes of a prompt (they are the
rows of one matmul), and no `[n, n]` mask exists.

Sources: shared-prefix attention merged by log-sum-exp, Hydragen (arXiv 2402.05099); tree attention
over ancestor indices, DeFT (arXiv 2404.00242).

Legend: T packed tokens, B prompts, L longest prompt, P static prefix, S node slots of a prompt, n
nodes, A ancestors of a node (itself included), H KV heads, G query heads per KV head, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from engine.torch_backend.context import PrefixKV, TorchContext

ATTENTION_NAME = "nightshelf_token_tree"
_MAX_SCORES = 1 << 26  # attention scores held at once, elements

# transformers passes these to every attention function; anything else would change the result.
_HARMLESS = {
    "dropout", "sliding_window", "position_ids", "use_cache", "cache", "is_causal",
    "output_attentions", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrefixPass:
    """Forwards the static prefix `[P]` and keeps its KV."""

    prefix: PrefixKV


@dataclass(frozen=True, slots=True)
class PromptPass:
    """Forwards packed prompts `[T]`; `place[t]` is the token's position in the `[B * L]` layout."""

    context: TorchContext
    place: Tensor


@dataclass(frozen=True, slots=True)
class NodePass:
    """Forwards n nodes; `place` is each node's position in the `[B * S]` layout."""

    context: TorchContext
    place: Tensor  # [n]
    num_slots: int
    ancestors: Tensor  # [n, A]
    is_ancestor: Tensor  # [n, A]


TreePass = PrefixPass | PromptPass | NodePass


def token_tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree_pass: TreePass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over packed rows: query `[1, H*G, T, D]`, key and value `[1, H, T,
    D]`.
    """
    unknown = {name for name, value in kwargs.items() if value is not None} - _HARMLESS
    assert tree_pass is not None, "token-tree attention needs a pass to belong to"
    assert not unknown, f"this model wants attention options we do not compute: {sorted(unknown)}"
    q = query[0].transpose(0, 1)  # [T, H*G, D]
    k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, H, D]
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    match tree_pass:
        case PrefixPass():
            out = _prefix_layer(tree_pass, q, k, v, scale)
        case PromptPass():
            out = _prompt_layer(tree_pass, layer, q, k, v, scale)
        case NodePass():
            out = _node_layer(tree_pass, layer, q, k, v, scale)
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, token_tree_attention)


def _prefix_layer(the_pass: PrefixPass, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()  # [H, P, D]
    the_pass.prefix.keys.append(k)
    the_pass.prefix.values.append(v)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _prompt_layer(
    the_pass: PromptPass, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    context = the_pass.context
    shape = (context.num_prompts, context.max_length)
    q, k, v = (
        _pad(x, the_pass.place, shape).transpose(1, 2) for x in (q, k, v)
    )  # [B, heads, L, D]
    context.prompt_keys.append(k.contiguous())
    context.prompt_values.append(v.contiguous())
    mask = None
    if context.prefix.length:
        k = torch.cat([context.prefix.keys[layer].expand(len(k), -1, -1, -1), k], dim=2)
        v = torch.cat([context.prefix.values[layer].expand(len(v), -1, -1, -1), v], dim=2)
        mask = _causal_after(context.prefix.length, context.max_length, q.device)
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)[the_pass.place]  # [T, H*G, D]


def _node_layer(
    the_pass: NodePass, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    context, num_nodes = the_pass.context, len(q)
    context.append(layer, k, v)
    heads = k.shape[1]
    q = (q * scale).view(num_nodes, heads, -1, q.shape[-1])  # [n, H, G, D]
    parts = [_attend_prompt(the_pass, layer, q), _attend_ancestors(the_pass, layer, q)]
    if context.prefix.length:
        parts.append(_attend_prefix(context.prefix, layer, q))
    return _merge(parts).to(k.dtype).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _Partial:
    """Attention over some of the keys: the weighted values and the log of the weights' sum."""

    out: Tensor  # [n, H, G, D] float32
    lse: Tensor  # [n, H, G] float32


def _attend_prompt(the_pass: NodePass, layer: int, q: Tensor) -> _Partial:
    context = the_pass.context
    k, v = context.prompt_keys[layer], context.prompt_values[layer]  # [B, H, L, D]
    num_prompts, heads, length, width = k.shape
    group, slots = q.shape[2], the_pass.num_slots
    padded = _pad(q, the_pass.place, (num_prompts, slots))  # [B, S, H, G, D]
    rows = padded.permute(0, 2, 1, 3, 4).reshape(num_prompts, heads, slots * group, width)
    hidden = torch.arange(length, device=q.device) >= context.lengths[:, None]  # [B, L]
    step = max(1, _MAX_SCORES // (heads * slots * group * length))
    outs, sums = [], []
    for begin in range(0, num_prompts, step):
        part = slice(begin, begin + step)
        scores = (rows[part] @ k[part].transpose(2, 3)).float()  # [b, H, S*G, L]
        scores.masked_fill_(hidden[part, None, None, :], -torch.inf)
        lse = scores.logsumexp(dim=-1)
        outs.append((scores - lse[..., None]).exp().to(v.dtype) @ v[part])
        sums.append(lse)

    def packed(x: Tensor) -> Tensor:  # [B, H, S*G, …] -> [n, H, G, …]
        x = x.reshape(*x.shape[:2], slots, group, *x.shape[3:]).transpose(1, 2)
        return x.flatten(0, 1)[the_pass.place]

    return _Partial(packed(torch.cat(outs)).float(), packed(torch.cat(sums)))


def _attend_ancestors(the_pass: NodePass, layer: int, q: Tensor) -> _Partial:
    context = the_pass.context
    k = context.node_keys[layer][the_pass.ancestors].transpose(1, 2)  # [n, H, A, D]
    v = context.node_values[layer][the_pass.ancestors].transpose(1, 2)
    scores = (q @ k.transpose(2, 3)).float()  # [n, H, G, A]
    scores = scores.masked_fill(~the_pass.is_ancestor[:, None, None, :], -torch.inf)
    lse = scores.logsumexp(dim=-1)
    return _Partial(((scores - lse[..., None]).exp().to(v.dtype) @ v).float(), lse)


def _attend_prefix(prefix: PrefixKV, layer: int, q: Tensor) -> _Partial:
    k, v = prefix.keys[layer], prefix.values[layer]  # [H, P, D]
    num_nodes, heads, group, width = q.shape
    rows = q.transpose(0, 1).reshape(heads, num_nodes * group, width)
    scores = (rows @ k.transpose(1, 2)).float()  # [H, n*G, P]
    lse = scores.logsumexp(dim=-1)
    out = (scores - lse[..., None]).exp().to(v.dtype) @ v
    return _Partial(
        out.view(heads, num_nodes, group, width).transpose(0, 1).float(),
        lse.view(heads, num_nodes, group).transpose(0, 1),
    )


def _merge(parts: list[_Partial]) -> Tensor:
    """The softmax over all keys together, from the partial ones `[n, H, G, D]`."""
    lse = torch.stack([part.lse for part in parts])
    weight = (lse - lse.logsumexp(dim=0)).exp()
    out = sum(part.out * w[..., None] for part, w in zip(parts, weight, strict=True))
    assert isinstance(out, Tensor), "a node always sees itself"
    return out


def _pad(x: Tensor, place: Tensor, shape: tuple[int, int]) -> Tensor:
    """Packed rows `[T, …]` at their places in a zero layout `[*shape, …]`."""
    out = x.new_zeros((shape[0] * shape[1], *x.shape[1:]))
    out[place] = x
    return out.view(*shape, *x.shape[1:])


def _causal_after(prefix: int, length: int, device: torch.device) -> Tensor:
    """Mask `[L, P + L]`: everything of the prefix, and the own prompt up to oneself."""
    own = torch.ones((length, length), dtype=torch.bool, device=device).tril()
    return torch.cat([own.new_ones((length, prefix)), own], dim=1)

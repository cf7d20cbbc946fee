"""Token-tree attention, registered with transformers so that any of its causal LMs runs it.

A node attends three disjoint sets of keys: the static prefix, its own prompt, and its ancestors
with itself. Each set gives a partial softmax, and the partial results are merged, which is exact.
The prompt's keys are read once for all nodes of a prompt (they are the rows of one matmul), and no
`[n, n]` mask exists.

A row's bits do not depend on what shares its batch (float32 on CPU): rows, slots and key lengths
are padded to whole tiles, masked keys weigh exactly 0, and the softmax's sum comes from the same
matmul as its values (a column of ones beside V), so that its order of summation is the kernel's and
not a reduction's. Elsewhere prompts go through the library's fused attention.

Sources: shared-prefix attention merged by log-sum-exp, Hydragen (arXiv 2402.05099); tree attention
over ancestor indices, DeFT (arXiv 2404.00242).

Legend: T packed rows, B prompts, L longest prompt (padded), P static prefix, S node slots of a
prompt (padded), n nodes, A ancestors of a node (itself included), H KV heads, G query heads per KV
head, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from engine.row_tiles import LEAST_KEYS, TILE, padded
from engine.torch_backend.context import PrefixKV, TorchContext

ATTENTION_NAME = "nightshelf_token_tree"
_MAX_SCORES = 1 << 26  # attention scores held at once, elements
_QUERY_BLOCK = 256  # prompt positions that attend together

# transformers passes these to every attention function; anything else would change the result.
_HARMLESS = {
    "dropout", "sliding_window", "position_ids", "use_cache", "cache", "is_causal",
    "output_attentions", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrefixPass:
    """Forwards the static prefix, P rows, and keeps its KV."""

    prefix: PrefixKV
    num_rows: int
    independent: bool


@dataclass(frozen=True, slots=True)
class PromptPass:
    """Forwards packed prompts; `place[t]` is a token's position in the `[B * L]` layout."""

    context: TorchContext
    place: Tensor
    num_rows: int
    independent: bool


@dataclass(frozen=True, slots=True)
class NodePass:
    """Forwards n nodes; `place` is each node's position in the `[B * S]` layout."""

    context: TorchContext
    place: Tensor  # [n]
    num_slots: int
    ancestors: Tensor  # [n, A]
    is_ancestor: Tensor  # [n, A]
    num_rows: int


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
    """Attention of one layer: query `[1, H*G, T, D]`, key and value `[1, H, T, D]`.

    Rows behind the pass's `num_rows` are padding: they attend nothing and get zeros.
    """
    unknown = {name for name, value in kwargs.items() if value is not None} - _HARMLESS
    assert tree_pass is not None, "token-tree attention needs a pass to belong to"
    assert not unknown, f"this model wants attention options we do not compute: {sorted(unknown)}"
    rows = tree_pass.num_rows
    q = query[0].transpose(0, 1)[:rows]  # [T, H*G, D]
    k, v = (x[0].transpose(0, 1)[:rows] for x in (key, value))  # [T, H, D]
    q = q * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    match tree_pass:
        case PrefixPass():
            out = _prefix_layer(tree_pass, q, k, v)
        case PromptPass():
            out = _prompt_layer(tree_pass, layer, q, k, v)
        case NodePass():
            out = _node_layer(tree_pass, layer, q, k, v)
    padding = query.shape[2] - rows
    return functional.pad(out, (0, 0, 0, 0, 0, padding))[None], None


AttentionInterface.register(ATTENTION_NAME, token_tree_attention)


def _prefix_layer(the_pass: PrefixPass, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()  # [H, P, D]
    the_pass.prefix.keys.append(k)
    the_pass.prefix.values.append(v)
    out = _causal(q.transpose(0, 1)[None], k[None], v[None], 0, the_pass.independent)
    return out[0].transpose(0, 1)


def _prompt_layer(the_pass: PromptPass, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context, prefix = the_pass.context, the_pass.context.prefix
    shape = (context.num_prompts, context.max_length)
    q, k, v = (
        _pad(x, the_pass.place, shape).transpose(1, 2) for x in (q, k, v)
    )  # [B, heads, L, D]
    context.prompt_keys.append(k.contiguous())
    context.prompt_values.append(v.contiguous())
    if prefix.length:
        k = torch.cat([prefix.keys[layer].expand(len(k), -1, -1, -1), k], dim=2)
        v = torch.cat([prefix.values[layer].expand(len(v), -1, -1, -1), v], dim=2)
    out = _causal(q, k, v, prefix.length, the_pass.independent)
    return out.transpose(1, 2).flatten(0, 1)[the_pass.place]  # [T, H*G, D]


def _causal(q: Tensor, k: Tensor, v: Tensor, before: int, independent: bool) -> Tensor:
    """Causal attention `[B, H*G, L, D]` of scaled queries over `before` keys and their own `L`."""
    if not independent:
        mask = _causal_mask(q.shape[2], before, q.device) if before else None
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=True
        )
    num_prompts, heads, length, width = q.shape
    q = q.reshape(num_prompts, k.shape[1], -1, length, width)  # [B, H, G, L, D]
    keys = padded(before + length, LEAST_KEYS)
    k = functional.pad(k, (0, 0, 0, keys - k.shape[2]))
    v = functional.pad(v, (0, 0, 0, keys - v.shape[2]))
    out = torch.empty_like(q)
    for begin in range(0, length, _QUERY_BLOCK):
        block = slice(begin, min(begin + _QUERY_BLOCK, length))
        seen = padded(
            before + block.stop, LEAST_KEYS
        )  # the rows' own place decides, not the longest prompt
        hidden = ~_causal_mask(length, before, q.device)[block]
        hidden = functional.pad(hidden, (0, seen - hidden.shape[1]), value=True)[:, :seen]
        step = max(1, _MAX_SCORES // (heads * _QUERY_BLOCK * seen))
        for first in range(0, num_prompts, step):
            part = slice(first, first + step)
            rows = q[part, :, :, block].flatten(2, 3)  # [b, H, G*block, D]
            mask = hidden.repeat(q.shape[2], 1)
            partial = _attend(rows, k[part, :, :seen], v[part, :, :seen], mask)
            done = partial.out / partial.total[..., None]
            out[part, :, :, block] = done.view(len(done), k.shape[1], q.shape[2], -1, width)
    return out.flatten(1, 2)


def _causal_mask(length: int, before: int, device: torch.device) -> Tensor:
    """Visible keys `[L, before + L]`: everything before, and the own prompt up to oneself."""
    own = torch.ones((length, length), dtype=torch.bool, device=device).tril()
    return torch.cat([own.new_ones((length, before)), own], dim=1)


@dataclass(frozen=True, slots=True)
class _Partial:
    """Attention over some of the keys, not yet divided by the sum of its weights. float32."""

    out: Tensor  # [..., D] sum of exp(score - top) * value
    total: Tensor  # [...] sum of exp(score - top)
    top: Tensor  # [...] largest score; -inf: nothing is visible


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> _Partial:
    """Scaled queries `[..., m, D]` over keys and values `[..., s, D]` that are not `hidden`."""
    scores = (q @ k.transpose(-1, -2)).float().masked_fill(hidden, -torch.inf)
    top = scores.amax(dim=-1)
    safe = torch.where(top == -torch.inf, 0.0, top)
    weights = (scores - safe[..., None]).exp().to(v.dtype)
    width = v.shape[-1]
    ones = functional.pad(v, (0, 1), value=1.0)  # the column behind the values sums the weights
    ones = functional.pad(ones, (0, padded(width + 1, TILE) - width - 1))
    out = (weights @ ones).float()
    return _Partial(out[..., :width], out[..., width], top)


def _node_layer(the_pass: NodePass, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = the_pass.context
    context.append(layer, k, v)
    q = q.view(len(q), k.shape[1], -1, q.shape[-1])  # [n, H, G, D]
    parts = [_attend_prompt(the_pass, layer, q), _attend_ancestors(the_pass, layer, q)]
    if context.prefix.length:
        parts.append(_attend_prefix(context.prefix, layer, q))
    return _merge(parts).to(k.dtype).flatten(1, 2)


def _attend_prompt(the_pass: NodePass, layer: int, q: Tensor) -> _Partial:
    context = the_pass.context
    k, v = context.prompt_keys[layer], context.prompt_values[layer]  # [B, H, L, D]
    num_prompts, heads, length, width = k.shape
    group, slots = q.shape[2], the_pass.num_slots
    laid_out = _pad(q, the_pass.place, (num_prompts, slots))  # [B, S, H, G, D]
    rows = laid_out.permute(0, 2, 1, 3, 4).reshape(num_prompts, heads, slots * group, width)
    hidden = torch.arange(length, device=q.device) >= context.lengths[:, None]  # [B, L]
    step = max(1, _MAX_SCORES // (heads * slots * group * length))
    parts = [
        _attend(rows[at], k[at], v[at], hidden[at, None, None, :])
        for at in (slice(first, first + step) for first in range(0, num_prompts, step))
    ]

    def packed(xs: list[Tensor]) -> Tensor:  # [B, H, S*G, …] -> [n, H, G, …]
        x = torch.cat(xs)
        x = x.reshape(*x.shape[:2], slots, group, *x.shape[3:]).transpose(1, 2)
        return x.flatten(0, 1)[the_pass.place]

    return _Partial(
        packed([p.out for p in parts]),
        packed([p.total for p in parts]),
        packed([p.top for p in parts]),
    )


def _attend_ancestors(the_pass: NodePass, layer: int, q: Tensor) -> _Partial:
    """A node has few ancestors: plain products, whose bits no batch size can change."""
    k, v = the_pass.context.node_keys[layer], the_pass.context.node_values[layer]
    q = q.float()
    columns = the_pass.ancestors.unbind(dim=1)
    scores = torch.stack([(q * k[at].unsqueeze(2)).sum(dim=-1) for at in columns], dim=-1)
    scores = scores.masked_fill(~the_pass.is_ancestor[:, None, None, :], -torch.inf)
    top = scores.amax(dim=-1)
    out, total = torch.zeros_like(q), torch.zeros_like(top)
    for at, score in zip(columns, scores.unbind(dim=-1), strict=True):
        weight = (score - top).exp()
        out += weight[..., None] * v[at].unsqueeze(2)
        total += weight
    return _Partial(out, total, top)


def _attend_prefix(prefix: PrefixKV, layer: int, q: Tensor) -> _Partial:
    k, v = prefix.keys[layer], prefix.values[layer]  # [H, P, D]
    num_nodes, heads, group, width = q.shape
    rows = q.transpose(0, 1).reshape(heads, num_nodes * group, width)
    rows = functional.pad(rows, (0, 0, 0, padded(num_nodes * group, TILE) - num_nodes * group))
    more = padded(prefix.length, LEAST_KEYS) - prefix.length
    k, v = functional.pad(k, (0, 0, 0, more)), functional.pad(v, (0, 0, 0, more))
    partial = _attend(rows, k, v, torch.arange(k.shape[1], device=q.device) >= prefix.length)

    def packed(x: Tensor) -> Tensor:  # [H, n*G, …] -> [n, H, G, …]
        x = x[:, : num_nodes * group]
        return x.reshape(heads, num_nodes, group, *x.shape[2:]).transpose(0, 1)

    return _Partial(packed(partial.out), packed(partial.total), packed(partial.top))


def _merge(parts: list[_Partial]) -> Tensor:
    """The softmax over all keys together, from the partial ones `[n, H, G, D]`."""
    top = torch.stack([part.top for part in parts]).amax(dim=0)
    scale = [(part.top - top).exp() for part in parts]
    total = sum(part.total * s for part, s in zip(parts, scale, strict=True))
    out = sum(part.out * s[..., None] for part, s in zip(parts, scale, strict=True))
    assert isinstance(out, Tensor), "a node always sees itself"
    assert isinstance(total, Tensor), "a node always sees itself"
    return out / total[..., None]


def _pad(x: Tensor, place: Tensor, shape: tuple[int, int]) -> Tensor:
    """Packed rows `[T, …]` at their places in a zero layout `[*shape, …]`."""
    out = x.new_zeros((shape[0] * shape[1], *x.shape[1:]))
    out[place] = x
    return out.view(*shape, *x.shape[1:])

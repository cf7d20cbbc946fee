"""Token-tree attention, registered with transformers so that any of its causal LMs runs it.

A node attends three disjoint sets of keys: its ancestors with itself, the static prefix, and its
own prompt. Their scores stand side by side in one row, `[own columns | prompt]`, under one softmax.
The prompt's keys are read once for all nodes of a prompt (they are the rows of one matmul), and no
`[n, n]` mask exists.

A row's bits do not depend on what shares its batch (float32 on CPU): rows, slots and key lengths
are padded to whole tiles, masked keys weigh exactly 0, and a column's place in its row is its own,
whatever the longest prompt is, so that the softmax sums the same numbers in the same lanes.

Sources: one matmul over the shared prompt for all its continuations, Hydragen (arXiv 2402.05099);
tree attention over ancestor indices, DeFT (arXiv 2404.00242).

Legend: n packed rows, B prompts, L longest prompt (padded), P static prefix, A ancestors of a node
(itself included), H KV heads, G query heads per KV head, D head width; b and S as in passes.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from engine.backends.torch.context import PrefixKV, TorchContext
from engine.backends.torch.passes import Block, NodePass, PrefixPass, PromptPass, TreePass
from engine.backends.torch.varlen import Nodes, Segments, behind_prefix
from engine.row_tiles import LEAST_KEYS, TILE, padded

ATTENTION_NAME = "nightshelf_token_tree"
# Attention scores held at once, elements; on a CPU they stay in the cache.
_MAX_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
_QUERY_BLOCK = 128  # prompt positions that attend together

# transformers passes these to every attention function; anything else would change the result.
_HARMLESS = {
    "dropout", "sliding_window", "position_ids", "use_cache", "cache", "is_causal",
    "output_attentions", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k",
}  # fmt: skip


class OtherAttentionError(Exception):
    """A layer asks for an attention that is not computed here; the words say what."""


def token_tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree_pass: TreePass | None = None,
    ends: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query `[1, H*G, T, D]`, key and value `[1, H, T, D]`.

    With `ends` `[b]` the queries `[1, H*G, b, D]` are those of the last token of each prompt of a
    pass; keys and values are of all. Rows behind the pass's `num_rows` are padding: they attend
    nothing and get zeros.
    """
    unknown = {name for name, value in kwargs.items() if value is not None} - _HARMLESS
    if tree_pass is None:
        raise OtherAttentionError("it does not hand on what its layers are called with")
    if unknown:
        raise OtherAttentionError(f"it has {', '.join(sorted(unknown))}")
    if key.shape != value.shape:
        raise OtherAttentionError(
            f"keys of width {key.shape[-1]} and values of width {value.shape[-1]}"
        )
    rows = tree_pass.num_rows
    q = query[0].transpose(0, 1)[:rows]  # [T, H*G, D]
    k, v = (x[0].transpose(0, 1)[:rows] for x in (key, value))  # [T, H, D]
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    q = q if scaling == 1.0 else q * scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # torch types it as a Tensor
    match tree_pass:
        case PrefixPass():
            out = _prefix_layer(tree_pass, q, k, v)
        case PromptPass() if ends is not None:
            return _ends_layer(tree_pass, layer, q, k, v)[None], None
        case PromptPass():
            out = _prompt_layer(tree_pass, layer, q, k, v)
        case NodePass():
            out = _node_layer(tree_pass, layer, q, k, v)
    if padding := query.shape[2] - rows:
        out = functional.pad(out, (0, 0, 0, 0, 0, padding))
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, token_tree_attention)


def _prefix_layer(the_pass: PrefixPass, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()  # [H, P, D]
    the_pass.prefix.keys.append(k)
    the_pass.prefix.values.append(v)
    out = _causal(q.transpose(0, 1)[None], k[None], v[None], 0)
    return out[0].transpose(0, 1)


def _prompt_layer(the_pass: PromptPass, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context, prefix = the_pass.context, the_pass.context.prefix
    if the_pass.place is None:
        assert context.segments is not None, "made with the kernels"
        context.keep_packed(k, v)
        return _packed(context, layer, q, context.segments, causal=True)
    q = _pad(q, the_pass.place, the_pass.shape).transpose(1, 2)  # [b, H*G, l, D]
    k, v = _kept(the_pass, the_pass.place, layer, k, v)
    if not prefix.length:
        out = _causal(q, k, v, 0)
    elif q.device.type == "cpu":
        out = _causal_behind(q, k, v, prefix, layer)
    else:
        k = torch.cat([prefix.keys[layer].expand(len(k), -1, -1, -1), k], dim=2)
        v = torch.cat([prefix.values[layer].expand(len(v), -1, -1, -1), v], dim=2)
        out = _causal(q, k, v, prefix.length)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, the_pass.place)  # [n, H*G, D]


def _kept(
    the_pass: PromptPass, place: Tensor, layer: int, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values `[b, H, l, D]` of the pass, once the context has them."""
    context = the_pass.context
    k, v = (_pad(x, place, the_pass.shape) for x in (k, v))  # [b, l, H, D]
    context.keep_prompts(layer, the_pass.prompts, k, v)
    kept = (the_pass.prompts, slice(None), slice(the_pass.length))
    return context.prompt_keys[layer][kept], context.prompt_values[layer][kept]


def _ends_layer(the_pass: PromptPass, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last token of each prompt `[b, H*G, D]`, which sees its whole prompt."""
    context, prefix = the_pass.context, the_pass.context.prefix
    if the_pass.place is None:
        context.keep_packed(k, v)
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        return _packed(context, layer, q, Segments(starts, 1), causal=False)
    k, v = _kept(the_pass, the_pass.place, layer, k, v)
    q = q.view(len(q), k.shape[1], -1, q.shape[-1])  # [b, H, G, D]
    key = torch.arange(the_pass.length, device=q.device)
    behind = key >= context.lengths[the_pass.prompts, None]
    scores = (q @ k.mT).masked_fill_(behind[:, None, None], -torch.inf)
    if prefix.length:
        scores = torch.cat([scores, _prefix_scores(q, prefix, layer)], dim=-1)
    weights = scores.softmax(dim=-1)
    out = weights[..., : the_pass.length] @ v
    if prefix.length:
        out += _prefix_values(weights[..., the_pass.length :], prefix, layer)
    return out.flatten(1, 2)


def _causal(q: Tensor, k: Tensor, v: Tensor, before: int) -> Tensor:
    """Causal attention `[b, H*G, l, D]` of scaled queries over `before` keys and their own `l`."""
    if q.device.type != "cpu":
        mask = _causal_mask(q.shape[2], before, q.device) if before else None
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=True
        )
    num_prompts, heads, length, width = q.shape
    q = q.reshape(num_prompts * k.shape[1], -1, length, width)  # [b*H, G, l, D]
    group = q.shape[1]
    if more := padded(before + length, LEAST_KEYS) - k.shape[2]:
        k, v = (functional.pad(x, (0, 0, 0, more)) for x in (k, v))
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    out = torch.empty_like(q)
    for begin in range(0, length, _QUERY_BLOCK):
        block = slice(begin, min(begin + _QUERY_BLOCK, length))
        # The rows' own place decides how many keys there are, not the longest prompt.
        seen = padded(before + block.stop, LEAST_KEYS)
        later = torch.arange(begin, seen - before) > torch.arange(begin, block.stop)[:, None]
        mask = torch.zeros(later.shape, dtype=q.dtype).masked_fill_(later, -torch.inf)
        mask = mask.repeat(group, 1)  # what all these rows see is not in it
        for part in _parts(len(q), mask.shape[0] * seen, "cpu"):
            rows = q[part, :, block].flatten(1, 2)  # [., G*block, D]
            scores = rows @ k[part, :seen].transpose(1, 2)
            scores[:, :, before + begin :] += mask
            done = _weigh(scores.softmax(dim=-1), v[part, :seen])
            out[part, :, block] = done.view(len(done), group, -1, width)
    return out.view(num_prompts, heads, length, width)


def _causal_behind(q: Tensor, k: Tensor, v: Tensor, prefix: PrefixKV, layer: int) -> Tensor:
    """What `_causal` gives behind a prefix that all prompts share: its keys and values are met once
    per head, by the rows of all prompts, and no prompt has a copy of them.
    """
    num_prompts, heads, length, width = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    q = q.view(num_prompts, kv_heads, group, length, width)
    if more := padded(length, LEAST_KEYS) - length:
        k, v = (functional.pad(x, (0, 0, 0, more)) for x in (k, v))
    more = padded(prefix.length, LEAST_KEYS) - prefix.length
    prefix_keys, prefix_values = (
        functional.pad(x[layer], (0, 0, 0, more)) for x in (prefix.keys, prefix.values)
    )
    before = prefix_keys.shape[1]
    out = torch.empty_like(q)
    for begin in range(0, length, _QUERY_BLOCK):
        block = slice(begin, min(begin + _QUERY_BLOCK, length))
        seen, num_rows = padded(block.stop, LEAST_KEYS), group * (block.stop - begin)
        later = torch.arange(begin, seen) > torch.arange(begin, block.stop)[:, None]
        mask = torch.zeros(later.shape, dtype=q.dtype).masked_fill_(later, -torch.inf)
        mask = mask.repeat(group, 1)
        for part in _parts(num_prompts, kv_heads * num_rows * (before + seen), "cpu"):
            rows = q[part, :, :, block].transpose(0, 1).flatten(2, 3)  # [H, b, G*block, D]
            count = rows.shape[1] * num_rows
            far = _rows_of_heads(rows) @ prefix_keys.transpose(1, 2)  # [H, b*G*block, P]
            far[:, :, prefix.length :] = -torch.inf
            own = rows.flatten(0, 1) @ k[part, :, :seen].transpose(0, 1).flatten(0, 1).mT
            own[:, :, begin:] += mask
            own = own.view(kv_heads, count, seen)
            weights = torch.cat([far[:, :count], own], dim=-1).softmax(dim=-1)
            near = weights[:, :, before:].reshape(-1, num_rows, seen)
            done = _weigh(near, v[part, :, :seen].transpose(0, 1).flatten(0, 1))
            done = done.view(kv_heads, count, width)
            far = functional.pad(weights[:, :, :before], (0, 0, 0, _more_rows(count)))
            done += _weigh(far, prefix_values)[:, :count]
            laid = done.view(kv_heads, rows.shape[1], group, -1, width)
            out[part, :, :, block] = laid.transpose(0, 1)
    return out.view(num_prompts, heads, length, width)


def _rows_of_heads(rows: Tensor) -> Tensor:
    """`[H, b, R, D]` as `[H, b*R, D]`, in whole tiles of rows."""
    flat = rows.flatten(1, 2)
    return functional.pad(flat, (0, 0, 0, _more_rows(flat.shape[1])))


def _more_rows(rows: int) -> int:
    return padded(rows, TILE) - rows


def _causal_mask(length: int, before: int, device: torch.device) -> Tensor:
    """Visible keys `[l, before + l]`: everything before, and the own prompt up to oneself."""
    own = torch.ones((length, length), dtype=torch.bool, device=device).tril()
    return torch.cat([own.new_ones((length, before)), own], dim=1)


def _node_layer(the_pass: NodePass, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = the_pass.context
    context.keep_nodes(layer, the_pass.stored, k, v)
    if the_pass.segments is not None:
        of_nodes = context.node_keys[layer], context.node_values[layer]
        nodes = Nodes(*of_nodes, the_pass.ancestors, the_pass.is_ancestor)
        return _packed(context, layer, q, the_pass.segments, causal=False, nodes=nodes)
    q = q.view(len(q), k.shape[1], -1, q.shape[-1])  # [n, H, G, D]
    out = [_block_layer(the_pass, block, layer, q[block.rows]) for block in the_pass.blocks]
    return (out[0] if len(out) == 1 else torch.cat(out)).flatten(1, 2)


def _packed(
    context: TorchContext,
    layer: int,
    q: Tensor,
    rows: Segments,
    causal: bool,
    nodes: Nodes | None = None,
) -> Tensor:
    """One layer's attention over the own prompt, the static prefix, and ancestors if there are."""
    assert context.kernels is not None and context.segments is not None, "packed for kernels"
    flash = context.kernels.flash
    keys, values = context.prompt_keys[layer], context.prompt_values[layer]
    parts = [flash(q, keys, values, rows, context.segments, causal)]
    if context.prefix.length:
        of_prefix = context.prefix.keys[layer], context.prefix.values[layer]
        parts.append(behind_prefix(flash, q, *of_prefix))
    return context.kernels.combine(q, parts, nodes)


def _block_layer(the_pass: NodePass, block: Block, layer: int, q: Tensor) -> Tensor:
    """One layer's attention of the nodes of some prompts `[m, H, G, D]`."""
    context, prefix = the_pass.context, the_pass.context.prefix
    heads, ancestors = q.shape[1], the_pass.ancestors[block.rows]
    own = _ancestor_scores(q, context.node_keys[layer], ancestors, the_pass.is_ancestor[block.rows])
    num_ancestors = own.shape[-1]
    if prefix.length:
        own = torch.cat([own, _prefix_scores(q, prefix, layer)], dim=-1)
    keys, values = (
        kv[layer][block.prompts, :, : block.keys].flatten(0, 1)  # [b*H, l, D]
        for kv in (context.prompt_keys, context.prompt_values)
    )
    rows, own = block.prepack(q), block.prepack(own)
    hidden = _behind(block, context.lengths, heads)
    out, weights = torch.empty_like(rows), torch.empty_like(own)
    for part in _parts(len(rows), rows.shape[1] * (keys.shape[1] + own.shape[2]), q.device.type):
        scores = rows[part] @ keys[part].transpose(1, 2)
        tail = scores[:, :, block.shortest :]
        if hidden is None:
            tail.fill_(-torch.inf)
        else:
            tail.masked_fill_(hidden[part], -torch.inf)
        weight = torch.cat([own[part], scores], dim=-1).softmax(dim=-1)
        out[part] = _weigh(weight[:, :, own.shape[2] :], values[part])
        weights[part] = weight[:, :, : own.shape[2]]
    packed, weights = block.pack(out, heads), block.pack(weights, heads)
    for a, at in enumerate(ancestors.unbind(dim=1)):
        value = context.node_values[layer].index_select(0, at).unsqueeze(2)
        packed.addcmul_(weights[..., a : a + 1], value)
    if prefix.length:
        packed += _prefix_values(weights[..., num_ancestors:], prefix, layer)
    return packed


def _behind(block: Block, lengths: Tensor, heads: int) -> Tensor | None:
    """Keys from the shortest prompt's end on that lie behind the own prompt `[b*H, 1, .]`; None:
    all of them do.
    """
    if block.shortest == block.longest:
        return None
    key = torch.arange(block.shortest, block.keys, device=lengths.device)
    return (key >= lengths[block.prompts, None]).repeat_interleave(heads, dim=0)[:, None]


def _ancestor_scores(q: Tensor, keys: Tensor, ancestors: Tensor, real: Tensor) -> Tensor:
    """Scores of nodes over their ancestors `[m, H, G, A]`, in whole tiles of columns.

    In float32 plain products, whose bits no batch size can change; else a small matmul for each
    node and head, which is faster.
    """
    num_nodes, count = ancestors.shape
    if q.dtype == torch.float32:
        products = [
            (q * keys.index_select(0, at).unsqueeze(2)).sum(dim=-1) for at in ancestors.unbind(1)
        ]
        scores = torch.stack(products, dim=-1)
    else:
        heads, width = keys.shape[1:]
        at = ancestors[:, None] * heads + torch.arange(heads, device=q.device)[:, None]
        own = keys.view(-1, width).index_select(0, at.flatten())  # [m * H * A, D]
        scores = q @ own.view(num_nodes, heads, count, width).mT
    scores = scores.masked_fill_(~real[:, None, None, :], -torch.inf)
    return functional.pad(scores, (0, padded(count, TILE) - count), value=-torch.inf)


def _prefix_scores(q: Tensor, prefix: PrefixKV, layer: int) -> Tensor:
    """Scores of nodes over the static prefix `[m, H, G, P]`, in whole tiles of columns."""
    num_nodes, heads, group, width = q.shape
    more = padded(prefix.length, LEAST_KEYS) - prefix.length
    keys = functional.pad(prefix.keys[layer], (0, 0, 0, more))
    scores = _by_head(q) @ keys.transpose(1, 2)
    scores[:, :, prefix.length :] = -torch.inf
    return _by_node(scores, num_nodes, group)


def _prefix_values(weights: Tensor, prefix: PrefixKV, layer: int) -> Tensor:
    """The prefix's values, weighted `[m, H, G, D]`."""
    num_nodes, _, group, columns = weights.shape
    values = functional.pad(prefix.values[layer], (0, 0, 0, columns - prefix.length))
    return _by_node(_weigh(_by_head(weights), values), num_nodes, group)


def _by_head(x: Tensor) -> Tensor:
    """`[m, H, G, C]` as `[H, m * G, C]`, in whole tiles of rows."""
    rows = x.transpose(0, 1).flatten(1, 2)
    return functional.pad(rows, (0, 0, 0, padded(rows.shape[1], TILE) - rows.shape[1]))


def _by_node(x: Tensor, num_nodes: int, group: int) -> Tensor:
    """What `_by_head` did, undone."""
    x = x[:, : num_nodes * group]
    return x.reshape(len(x), num_nodes, group, x.shape[-1]).transpose(0, 1)


def _weigh(weights: Tensor, values: Tensor) -> Tensor:
    """`weights @ values`, in whole tiles of columns."""
    width = values.shape[-1]
    more = padded(width, TILE) - width
    return (weights @ functional.pad(values, (0, more)))[..., :width] if more else weights @ values


def _parts(size: int, scores_each: int, device: str) -> list[slice]:
    """Slices of a batch of matmuls whose scores are held at once."""
    step = max(1, _MAX_SCORES[device] // scores_each)
    return [slice(first, first + step) for first in range(0, size, step)]


def _pad(x: Tensor, place: Tensor, shape: tuple[int, int]) -> Tensor:
    """Packed rows `[n, …]` at their places in a zero layout `[*shape, …]`."""
    out = x.new_zeros((shape[0] * shape[1], *x.shape[1:]))
    return out.index_copy_(0, place, x).view(*shape, *x.shape[1:])

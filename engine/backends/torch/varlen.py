"""Attention on CUDA in bfloat16: fused kernels over packed prompts, merged by log-sum-exp.

A node's keys are its prompt, the static prefix, and its ancestors with itself. The first two are
met by the library's variable-length flash attention, which writes no score to memory and pads no
prompt, and which gives each row's log-sum-exp beside its output. The few ancestors are gathered. A
row's attention over all of its keys is the mean of the three outputs, weighted by the exponentials
of their log-sum-exps; nothing is approximated.

Sources: the merge, FlashAttention-2 (arXiv 2307.08691) and cascade inference (FlashInfer, arXiv
2501.01005); the kernel, `torch.nn.attention.varlen`.

Legend: n rows of a pass, B prompts, A ancestors of a node (itself included), P static prefix,
H KV heads, G query heads per KV head, N = H * G, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.backends.torch.capability import tried

_CLOSE = 0.05  # bfloat16 against float32, of values about 1
_MOST_WIDTH = 256  # of a head, in flash attention
_FIRST_CAPABILITY = 8  # Ampere


@dataclass(frozen=True, slots=True)
class Segments:
    """Rows or keys of B prompts end to end."""

    starts: Tensor  # [B + 1] int32, on the device
    longest: int  # at most this many belong to one prompt


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where the ancestors of the rows of a pass are among all nodes that are stored."""

    keys: Tensor  # [stored, H, D]
    values: Tensor  # [stored, H, D]
    ancestors: Tensor  # [n, A], a node itself first
    real: Tensor  # [n, A]


Flash = Callable[[Tensor, Tensor, Tensor, Segments, Segments, bool], tuple[Tensor, Tensor]]
"""Scaled queries `[n, N, D]`, keys and values `[k, H, D]`, whose they are, and whether a query sees
only the keys up to its own place; gives outputs `[n, N, D]` and log-sum-exps `[n, N]` float32.
"""

Combine = Callable[[Tensor, list[tuple[Tensor, Tensor]], "Nodes | None"], Tensor]
"""`combine` below, or that compiled."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What attends on a GPU."""

    flash: Flash
    combine: Combine


def find_flash(device: torch.device, head_dim: int) -> Flash | None:
    """The fused kernel where this machine has one that computes what it should, else None."""
    if head_dim > _MOST_WIDTH:
        return None
    if torch.cuda.get_device_capability(device)[0] < _FIRST_CAPABILITY:
        return None
    return tried("fused attention", library_flash, lambda flash: right(flash, device, head_dim))


def library_flash() -> Flash:
    """`torch.nn.attention.varlen`; raises `ImportError` where this torch has none."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    def flash(
        q: Tensor, k: Tensor, v: Tensor, queries: Segments, keys: Segments, causal: bool
    ) -> tuple[Tensor, Tensor]:
        done: Any = varlen_attn(
            q.contiguous(),
            k,
            v,
            queries.starts,
            keys.starts,
            queries.longest,
            keys.longest,
            return_aux=AuxRequest(lse=True),
            scale=1.0,
            window_size=(-1, 0) if causal else (-1, -1),
            enable_gqa=True,
        )
        out, log_sum = done
        return out, log_sum.T  # the kernel's is [N, n], whatever its documentation says

    return flash


def right(flash: Flash, device: torch.device, head_dim: int) -> bool:
    """Whether the kernel agrees with plain attention: prompts of several lengths, one of them
    without rows, two query heads per KV head.
    """
    noise = torch.Generator().manual_seed(0)

    def random(rows: int, heads: int) -> Tensor:
        x: Tensor = torch.randn((rows, heads, head_dim), generator=noise) * head_dim**-0.25
        return x.to(device, torch.bfloat16)

    k, v = random(12, 3), random(12, 3)
    keys = Segments(torch.tensor([0, 5, 7, 12], dtype=torch.int32, device=device), 5)
    some = Segments(torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=device), 5)
    for q, queries, causal in ((random(9, 6), some, False), (random(12, 6), keys, True)):
        got = flash(q, k, v, queries, keys, causal)
        want = plain(q.float(), k.float(), v.float(), queries, keys, causal)
        if not all(
            torch.allclose(a.float(), b, rtol=0, atol=_CLOSE)
            for a, b in zip(got, want, strict=True)
        ):
            return False
    return True


def plain(
    q: Tensor, k: Tensor, v: Tensor, queries: Segments, keys: Segments, causal: bool
) -> tuple[Tensor, Tensor]:
    """What a `Flash` computes, prompt by prompt."""
    out, log_sum = [], []
    rows, ends = queries.starts.tolist(), keys.starts.tolist()
    for b in range(len(rows) - 1):
        own = slice(ends[b], ends[b + 1])
        group = q.shape[1] // k.shape[1]
        some_k, some_v = (x[own].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q[rows[b] : rows[b + 1]], some_k)
        if causal:
            later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        log_sum.append(scores.logsumexp(dim=-1).T)
        out.append(torch.einsum("nqk,knd->qnd", scores.softmax(dim=-1), some_v))
    return torch.cat(out), torch.cat(log_sum).float()


def behind_prefix(flash: Flash, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """All rows `[n, N, D]` over the static prefix `[H, P, D]`, which is one sequence to them."""
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    return flash(q, keys, values, _whole(q), _whole(keys), False)


def _whole(x: Tensor) -> Segments:
    starts = torch.arange(2, dtype=torch.int32, device=x.device) * len(x)
    return Segments(starts, len(x))


def combine(q: Tensor, parts: list[tuple[Tensor, Tensor]], nodes: Nodes | None) -> Tensor:
    """Attention over all keys `[n, N, D]`: outputs and log-sum-exps over parts of them, and a few
    more keys of each row's own.

    Args:
        q: scaled queries `[n, N, D]`.
        parts: outputs `[n, N, D]` and log-sum-exps `[n, N]`.
        nodes: the ancestors of tree nodes; None: the rows are no nodes.
    """
    if nodes is None and len(parts) == 1:
        return parts[0][0]
    heads = q.shape[1] if nodes is None else nodes.keys.shape[1]
    shape = (len(q), heads, -1, q.shape[-1])  # [n, H, G, D]
    scores = [log_sum.view(shape[:3]) for _, log_sum in parts]
    values = [out.view(shape) for out, _ in parts]
    if nodes is not None:
        grouped = q.view(shape)
        for at, real in zip(nodes.ancestors.unbind(dim=1), nodes.real.unbind(dim=1), strict=True):
            score = (grouped * nodes.keys[at].unsqueeze(2)).sum(dim=-1, dtype=torch.float32)
            scores.append(score.masked_fill(~real[:, None, None], -torch.inf))
            values.append(nodes.values[at].unsqueeze(2))
    weights = torch.stack(scores, dim=-1).softmax(dim=-1)
    out = torch.zeros_like(q.view(shape), dtype=torch.float32)
    for i, value in enumerate(values):
        out.addcmul_(weights[..., i : i + 1], value)
    return out.to(q.dtype).flatten(1, 2)

"""How many rows fit on a device: what one packed pass, its KV and its logits take.

A function of the device's whole memory and not of what is free just now: packing decides the last
bits of bfloat16 scores, and must be the same when a run is resumed.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 0.8  # of the memory besides the model; the rest is fragmentation and other libraries
_FIXED = 1 << 30  # logits of a head chunk, codebooks in float32, attention scores, projector, trie
_LEAST, _MOST = 1024, 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What memory depends on."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    item_bytes: int  # of a number in the model's precision

    @property
    def kv_bytes_per_row(self) -> int:
        """Keys and values of one row in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.item_bytes

    @property
    def pass_bytes_per_row(self) -> int:
        """Temporaries of the widest layer: residual and its norm, queries and their attention (in
        float32 while parts are merged), the MLP's two branches and their product.
        """
        residual = 4 * self.hidden * self.item_bytes
        attention = (self.heads + 2 * self.kv_heads) * self.head_dim * (self.item_bytes + 3 * 4)
        return residual + attention + 3 * self.intermediate * self.item_bytes


def rows_that_fit(sizes: ModelSizes, total_bytes: int, model_bytes: int) -> int:
    """Rows of one pack on a device of `total_bytes` that holds a model of `model_bytes`."""
    room = _SHARE * (total_bytes - model_bytes) - _FIXED
    rows = int(room // (sizes.kv_bytes_per_row + sizes.pass_bytes_per_row))
    return max(_LEAST, min(rows, _MOST))

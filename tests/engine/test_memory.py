from __future__ import annotations

import dataclasses

from engine.backends.torch.memory import ModelSizes, rows_that_fit

QWEN3_0_6B = ModelSizes(
    layers=28, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128, item_bytes=2
)
GIB = 1 << 30


def test_kv_of_a_row_is_counted_to_the_byte():
    """Qwen3-0.6B keeps 2 x 28 layers x 8 heads x 128 numbers of 2 bytes: 112 KiB per token."""
    assert QWEN3_0_6B.kv_bytes_per_row == 112 * 1024


def test_more_memory_or_a_smaller_model_holds_more_rows_within_bounds():
    def rows(gib: float, **changes: int) -> int:
        sizes = dataclasses.replace(QWEN3_0_6B, **changes)
        return rows_that_fit(sizes, int(gib * GIB), int(1.2 * GIB))

    assert rows(1.0) == 1024, "a device that is full still gets the least"
    assert 1024 < rows(4) < rows(6) < rows(6, layers=14)
    assert rows(141) == 65536
    free = 0.8 * (6 - 1.2) * GIB
    used = rows(6) * (QWEN3_0_6B.kv_bytes_per_row + QWEN3_0_6B.pass_bytes_per_row)
    assert used < free - GIB + 1e6, "what is planned stays inside what there is"

"""What the cases share: small set-ups, and what a run left behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backend import Backend, PackedPrompts
from engine.decoding import Decoding
from engine.generate.beam_search import Beams, beam_search
from engine.scoring.items import score_items
from engine.trees.device_trie import DeviceTrie, to_device
from engine.trees.sid_trie import SidTrie, build_trie
from engine.trees.token_tree import build_token_tree
from schemas.requests import Ragged
from tests.factories import SIZES, bound_space, write_config

PARTITION = "out/ds=2026-11-28/surface=home"
CPU = torch.device("cpu")


def index_of(
    codes: Sequence[Sequence[int]] | np.ndarray,
    norm: str = "full_vocab",
    sizes: Sequence[int] = SIZES,
) -> tuple[SidTrie, DeviceTrie]:
    """A catalog by its codes, in token ids 20, 21, …"""
    trie = build_trie(np.asarray(codes, dtype=np.int32))
    return trie, to_device(trie, bound_space(sizes), norm, CPU)


def pack(
    prompts: Sequence[Sequence[int]],
    *,
    prefix: Sequence[int] = (),
    soft: dict[tuple[int, int], torch.Tensor] | None = None,
) -> PackedPrompts:
    """Prompts end to end; `soft[user, position]` is the vector standing there."""
    lists = Ragged.from_lists(prompts)
    places = sorted(soft or {})
    return PackedPrompts(
        token_ids=lists.values,
        offsets=lists.offsets,
        static_prefix=np.asarray(prefix, dtype=np.int64),
        soft_positions=np.asarray([lists.offsets[u] + p for u, p in places], dtype=np.int64),
        soft_vectors=torch.stack([soft[at] for at in places]) if soft else None,
    )


def score(
    backend: Backend, index: DeviceTrie, packed: PackedPrompts, items: Sequence[Sequence[int]]
) -> np.ndarray:
    """Scores of each prompt's items, end to end."""
    tree = build_token_tree(index.trie, Ragged.from_lists(items))
    context = backend.prefill(packed, tree.num_rows)
    return score_items(Decoding(backend, context, index), tree, max_rows=1000).numpy()


def search(
    backend: Backend,
    index: DeviceTrie,
    packed: PackedPrompts,
    *,
    width: int,
    k: int,
    dead: torch.Tensor | None = None,
) -> Beams:
    """Beam search of one width for every prompt."""
    context = backend.prefill(packed, 0)
    everyone = torch.arange(packed.num_prompts)
    widths = (width,) * index.trie.depth
    return beam_search(
        Decoding(backend, context, index), prompts=everyone, widths=widths, k=k, dead=dead
    )


def found_sids(beams: Beams, user: int = 0) -> list[int]:
    """The SIDs one user got, best first."""
    return beams.sid[user][beams.score[user] > -torch.inf].tolist()


class OpRecorder(TorchDispatchMode):
    """Counts the operations torch runs and remembers the largest tensor any of them returned.

    With `watch`, a weight `[columns, width]`, also how many rows meet how many of its columns in
    each matmul. Rows of zeros are padding and do not count.
    """

    def __init__(self, watch: torch.Tensor | None = None) -> None:
        super().__init__()
        self.num_ops = 0
        self.largest = 0
        self.met: list[tuple[int, int]] = []  # (rows, columns)
        self._watch = None if watch is None else watch.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.num_ops += 1
        outs = out if isinstance(out, (tuple, list)) else [out]
        self.largest = max([self.largest, *(o.numel() for o in outs if torch.is_tensor(o))])
        if func.overloadpacket.__name__ in ("mm", "addmm", "linear", "bmm"):
            rows, weight = [a for a in args if torch.is_tensor(a) and a.dim() > 1][:2]
            if weight.untyped_storage().data_ptr() == self._watch:
                real = int((rows != 0).any(dim=-1).sum())
                self.met.append((real, weight.numel() // rows.shape[-1]))
        return out


def torch_config(folder: Path, model: str, **changes: Any) -> Path:
    """A run of the torch backend over `write_inputs`; the prompt is the history."""
    engine = {"backend": "torch", "model": model, "device": "cpu"}
    prompt = {"template": "{history}", "max_tokens": 200}
    return write_config(folder, engine=engine, prompt=prompt, **changes)


def write_projector(folder: Path, *, input_dim: int = 4, hidden: int = 32, tokens: int = 2) -> str:
    """A random linear projector of user vectors."""
    folder.mkdir()
    spec = {
        "kind": "linear",
        "input_dim": input_dim,
        "output_dim": hidden,
        "num_tokens": tokens,
    }
    (folder / "projector.json").write_text(json.dumps(spec))
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(tokens * hidden, input_dim, generator=generator)
    save_file({"weight": weight}, str(folder / "projector.safetensors"))
    return str(folder)


def published(folder: Path, partition: str = PARTITION) -> pl.DataFrame:
    """The rows of a finished partition, without the run that made them."""
    assert (folder / partition / "_SUCCESS").exists()
    rows = pl.read_parquet(folder / partition, hive_partitioning=False)
    return rows.drop("run_id").sort("user_id", "rank")


def staged(summary: dict[str, Any], kind: str) -> pl.DataFrame:
    """What a run staged: `recommendations`, `outcomes` or `quarantine`."""
    found = sorted(Path(summary["run_dir"]).glob(f"staged/*-{kind}.parquet"))
    return pl.concat(pl.read_parquet(p) for p in found)


def write(folder: Path, name: str, table: pa.Table | dict[str, Any]) -> None:
    """Write an input table."""
    table = table if isinstance(table, pa.Table) else pa.table(table)
    pq.write_table(table, folder / f"{name}.parquet")


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    """The table with a column replaced or added."""
    if name in table.column_names:
        return table.set_column(table.schema.get_field_index(name), name, pa.array(values))
    return table.append_column(name, pa.array(values))

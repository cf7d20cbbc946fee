"""Exact search beside beams, and ranking by search beside scoring everything.

    python -m benchmarks.bounded                  # 16 cells at the shape of Qwen3-0.6B, 8 layers
    python -m benchmarks.bounded --users 24 --items 10000 --prompt 64
    python -m benchmarks.bounded --movielens      # the example's own model, after `make demo`

Every cell prefills once; then the contenders take turns over the same context, and what is printed
is the median of the turns. The model is random and sharpened (sharpened.py): `--alpha 5` is nearest
to the perplexities of the trained example, `--alpha 1` is flat. JSON with `--json FILE`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import LEVELS, Checkpoint, make_checkpoint
from benchmarks.report import machine_facts
from benchmarks.sharpened import Sharpened
from engine.backend import PackedPrompts
from engine.backends.torch.backend import TorchBackend
from engine.decoding import Decoding
from engine.generate.beam_search import search_by_beams
from engine.generate.search import search
from engine.prompts.tokenizer import CheckpointTokenizer
from engine.scoring.items import score_in_parts
from engine.scoring.ranking import rank_candidates
from engine.trees.device_trie import DeviceTrie, to_device
from engine.trees.sid_trie import SidTrie, build_trie
from engine.trees.token_tree import build_token_tree
from schemas.requests import Ragged, SidBeams
from schemas.search_work import SearchWork
from schemas.settings import GenerateSettings

K, RANKED = 20, 1000  # results; candidates of a user
_NODES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender of one cell."""

    cell: str
    contender: str
    seconds: float  # median
    ratio: float  # its time over that of the first contender of the cell
    nodes: float | None  # per user
    rounds: float | None
    exact: float | None  # share of lists known to be exact


Contender = Callable[[], tuple[float | None, float | None, float | None]]


def take_turns(cell: str, contenders: dict[str, Contender], repeats: int) -> list[Row]:
    """Medians of interleaved turns; a first turn of each warms up and gives the counts."""
    counts = {name: run() for name, run in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(turns) for name, turns in seconds.items()}
    first = next(iter(medians.values()))
    return [
        Row(
            cell=cell, contender=name, seconds=round(median, 4), ratio=round(median / first, 2),
            nodes=counts[name][0], rounds=counts[name][1], exact=counts[name][2],
        )
        for name, median in medians.items()
    ]  # fmt: skip


def figures_of(beams: SidBeams, work: SearchWork, k: int) -> tuple[float, float, float]:
    """Nodes and rounds per user, and the share of lists that are known to be exact."""
    num = len(beams.pruned)
    kth = np.full(num, -np.inf, dtype=np.float32)
    count = np.bincount(beams.user, minlength=num)
    last = np.cumsum(count) - 1
    kth[count == k] = beams.score[last[count == k]]
    exact = (kth > beams.pruned) | (beams.pruned == -np.inf)
    return (
        round(float(work.nodes.mean()), 1),
        round(float(work.rounds.mean()), 2),
        float(exact.mean()),
    )


def generation(decoding: Decoding, *, dead: torch.Tensor | None = None) -> dict[str, Contender]:
    """Beams of 64 first, which the others are held against."""
    levels = decoding.index.trie.depth

    def beam(width: int) -> Contender:
        def run() -> tuple[float, float, float]:
            with decoding.temporary():
                beams, _, work = search_by_beams(
                    decoding,
                    GenerateSettings(width=width),
                    widths=(width,) * levels,
                    k=K,
                    dead=dead,
                )
            return figures_of(beams, work, K)

        return run

    def best_first() -> tuple[float, float, float]:
        with decoding.temporary():
            beams, _, work = search(
                decoding, GenerateSettings(), widths=(64,) * levels, k=K, dead=dead
            )
        return figures_of(beams, work, K)

    return {"beam 64": beam(64), "beam 128": beam(128), "best first (auto)": best_first}


def ranking(decoding: Decoding, lists: Ragged, k: int) -> dict[str, Contender]:
    """The full pass first."""
    tree = build_token_tree(decoding.index.trie, lists)

    def full() -> tuple[float, None, float]:
        with decoding.temporary():
            _, nodes = score_in_parts(decoding, lists, _NODES, tree=tree)
        return round(float(nodes.mean()), 1), None, 1.0

    def best_first() -> tuple[float, float, float]:
        with decoding.temporary():
            found = rank_candidates(decoding, lists, tree, k=k, max_nodes=_NODES)
        assert found is not None
        nodes, rounds = found.work.nodes.mean(), found.work.rounds.mean()
        return round(float(nodes), 1), round(float(rounds), 2), 1.0

    return {"all candidates": full, "best first": best_first}


def packed(trie: SidTrie, index: DeviceTrie, users: int, tokens: int) -> PackedPrompts:
    """Histories of random items."""
    rng = np.random.default_rng(1)
    items = -(-tokens // LEVELS)
    sids = rng.integers(0, trie.num_sids, (users, items))
    codes = trie.codes_of_sid[sids].reshape(users, -1)[:, :tokens]
    levels = np.arange(codes.shape[1]) % LEVELS
    table = [ids[codes[:, at]] for at, ids in enumerate(index.token_ids[d] for d in levels)]
    empty: NDArray[np.int64] = np.empty(0, dtype=np.int64)
    return PackedPrompts(
        token_ids=np.stack(table, axis=1).reshape(-1).astype(np.int64),
        offsets=np.arange(users + 1) * tokens,
        static_prefix=empty,
        soft_positions=empty,
        soft_vectors=None,
    )


def measure(checkpoint: Checkpoint, args: argparse.Namespace) -> dict[str, Any]:
    """All cells at a real shape."""
    backend = TorchBackend(checkpoint.folder, checkpoint.dtype, torch.device("cpu"))
    tokenizer = CheckpointTokenizer(checkpoint.folder)
    rows: list[Row] = []
    perplexity: dict[str, list[float]] = {}
    rng = np.random.default_rng(0)
    for items, alpha in itertools.product(args.items, args.alpha):
        codes = rng.integers(0, args.codes, (items, LEVELS)).astype(np.int32)
        trie = build_trie(codes)
        space = checkpoint.space.bind(tokenizer.token_id)
        index = to_device(trie, space, "full_vocab", torch.device("cpu"))
        for users, tokens in itertools.product(args.users, args.prompt):
            sharp = Sharpened(backend, index, alpha)
            context = sharp.prefill(packed(trie, index, users, tokens), 160 * users)
            decoding = Decoding(sharp, context, index)  # type: ignore[arg-type]  # a duck
            cell = f"{users} users, {tokens} tokens, {items:,} items, alpha {alpha:g}"
            rows += take_turns(cell, generation(decoding), args.repeats)
            perplexity[cell] = sharp.mean_perplexity()
            if items == min(args.items) and tokens == min(args.prompt):
                size = min(RANKED, items)
                some = [rng.choice(items, size, replace=False).tolist() for _ in range(users)]
                lists = Ragged.from_lists(some)
                name = f"{cell}: rank {K} of {size:,}"
                rows += take_turns(name, ranking(decoding, lists, K), args.repeats)
    return {"model": checkpoint.label, "perplexity": perplexity, "rows": rows}


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    console = Console(width=132, highlight=False)
    console.print(report["model"])
    table = Table(title="ratio: a contender's median time over the first one's")
    for name in ("cell", "contender"):
        table.add_column(name, no_wrap=True)
    for name in ("median s", "ratio", "prefixes", "rounds", "exact"):
        table.add_column(name, justify="right")
    last = None
    for row in report["rows"]:
        if row.cell != last:
            table.add_section()
        table.add_row(
            "" if row.cell == last else row.cell,
            row.contender,
            f"{row.seconds:.3f}",
            f"{row.ratio:.2f}",
            "-" if row.nodes is None else f"{row.nodes:.1f}",
            "-" if row.rounds is None else f"{row.rounds:.2f}",
            "-" if row.exact is None else f"{row.exact:.0%}",
        )
        last = row.cell
    console.print(table)
    for cell, levels in report["perplexity"].items():
        console.print(f"effective children by length of the prefix, {cell}: {levels}")


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--movielens", action="store_true", help="the example's model and tables")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--codes", type=int, default=256)
    parser.add_argument("--users", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--prompt", type=int, nargs="+", default=[64, 300])
    parser.add_argument("--items", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--alpha", type=float, nargs="+", default=[5.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--packs", type=int, default=5, help="of the MovieLens users")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    with torch.inference_mode(), tempfile.TemporaryDirectory(prefix="nightshelf-bench-") as folder:
        if args.movielens:
            from benchmarks.bounded_movielens import measure_movielens

            report = measure_movielens(args.packs, args.repeats)
        else:
            checkpoint = make_checkpoint(
                Path(folder), name=args.model, layers=args.layers, codes=args.codes,
                dtype=args.dtype, seed=0,
            )  # fmt: skip
            report = measure(checkpoint, args)
    show(report)
    if args.json:
        facts = machine_facts(torch.device("cpu"), args.dtype)
        rows = [{name: getattr(row, name) for name in Row.__slots__} for row in report["rows"]]
        args.json.write_text(json.dumps(report | {"rows": rows, "machine": facts}, indent=2) + "\n")


if __name__ == "__main__":
    main()

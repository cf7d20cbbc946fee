"""The comparison of `benchmarks.bounded` on the MovieLens example: a trained model, its own users.

The example must have been built (`make demo`). Users keep their exclusions: what they watched.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.bounded import K, Row, generation, ranking, take_turns
from engine.decoding import Decoding
from engine.engine import Engine, open_engine
from engine.trees.exclusions import dead_nodes
from pipelines.catalog.items import open_items
from pipelines.inputs.prepare import prepare_run
from pipelines.inputs.read_batches import read_shard
from pipelines.planning.plan import plan_run
from schemas.config_file import load_config
from schemas.requests import CandidateSets, Ragged, UserBatch

_CONFIG = Path(__file__).parents[1] / "examples" / "movielens" / "generate.yaml"
_CANDIDATES = ((100, K), (500, K), (500, 10), (None, K))  # None: every film not watched


def measure_movielens(packs: int, repeats: int) -> dict[str, Any]:
    """Seconds are those of all packs together."""
    parts: dict[str, list[list[Row]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="nightshelf-bench-") as folder:
        config = load_config(str(_CONFIG), overrides=[f"run.work_dir={folder}"])
        plan = plan_run(config)
        catalog = open_items(plan)
        assert catalog is not None
        shards = prepare_run(plan)
        with open_engine(config, catalog.trie) as engine:
            for shard in shards:
                users = read_shard(plan, shard, catalog).users
                for decoding, mine in _packs(engine, users, packs):
                    for name, rows in _cells(decoding, mine, repeats):
                        parts[name].append(rows)
                packs -= 1 + users.num_users // 60
                if packs <= 0:
                    break
    rows = [row for name, many in parts.items() for row in _together(name, many)]
    return {"model": "the MovieLens example, float32", "perplexity": {}, "rows": rows}


def _packs(engine: Engine, users: UserBatch, most: int) -> Iterator[tuple[Decoding, UserBatch]]:
    prepared = engine.prepare(users)
    for pack in prepared.packs[:most]:
        if len(pack) >= 16:  # the last of a shard may be a few users
            mine = users.take(pack)
            yield engine.prefill(prepared, pack, 160 * len(pack)), mine


def _cells(decoding: Decoding, users: UserBatch, repeats: int) -> Iterator[tuple[str, list[Row]]]:
    trie = decoding.index.trie
    assert users.excluded is not None
    dead = decoding.index.put(dead_nodes(trie, users.excluded))
    yield "generate", take_turns("generate", generation(decoding, dead=dead), repeats)
    rng = np.random.default_rng(0)
    unseen = [
        np.setdiff1d(np.arange(trie.num_items), users.excluded.row(user))
        for user in range(users.num_users)
    ]
    for size, k in _CANDIDATES:
        name = f"rank {k} of {size or 'all unseen'}"
        some = unseen if size is None else [rng.choice(one, size, replace=False) for one in unseen]
        lists = CandidateSets.own(Ragged.from_lists(one.tolist() for one in some)).lists()
        yield name, take_turns(name, ranking(decoding, lists, k), repeats)


def _together(name: str, packs: list[list[Row]]) -> list[Row]:
    """Packs of one cell as one: seconds add up, the rest is a mean over packs."""
    rows = []
    for same in zip(*packs, strict=True):

        def mean(field: str, same: tuple[Row, ...] = same) -> float | None:
            values = [getattr(row, field) for row in same]
            return None if None in values else round(fmean(values), 3)

        seconds = sum(row.seconds for row in same)
        first = sum(rows[0].seconds for rows in packs)
        rows.append(
            replace(
                same[0], seconds=seconds, ratio=round(seconds / first, 2),
                nodes=mean("nodes"), rounds=mean("rounds"), exact=mean("exact"),
            )
        )  # fmt: skip
    return rows

"""Diversity by quota, inside selection: against a greedy pass over the exhaustive ranking."""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl
import pytest
import torch

from engine.backends.fake.backend import FakeBackend
from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.scoring.items import score_items
from engine.search.pool import sort_key
from engine.trees.device_trie import to_device
from engine.trees.quotas import beams_per_group, place_in_group
from engine.trees.sid_trie import build_trie
from engine.trees.token_tree import build_token_tree
from schemas.requests import Ragged
from schemas.settings import QuotaSettings
from tests.factories import bound_space, prompts_of, random_codes, write_config, write_inputs


def setting(seed, level, max_items, ragged):
    trie = build_trie(random_codes(np.random.default_rng(seed), 60, ragged=ragged))
    quota = QuotaSettings(level=level, max_items=max_items)
    index = to_device(trie, bound_space(), "trie", torch.device("cpu"), quota)
    backend, prompts = FakeBackend(), [[seed], [seed, 1], [2, seed]]
    tree = build_token_tree(trie, Ragged.from_lists([range(60)] * len(prompts)))
    context = backend.prefill(prompts_of(prompts), tree.num_rows)
    scores = score_items(Decoding(backend, context, index), tree, 1000).view(len(prompts), -1)
    return trie, index, backend, prompts, scores[:, trie.items[trie.first_item[:-1]]].numpy()


def greedy(scores, codes, level, max_items, k):
    """The best k SIDs of which at most `max_items` share their first codes, in plain Python."""
    taken, used = [], Counter()
    for sid in sorted(range(len(scores)), key=lambda s: (-scores[s], s)):
        group = tuple(codes[sid][:level].tolist())
        if used[group] < max_items and len(taken) < k:
            used[group] += 1
            taken.append(sid)
    return taken


def search(index, backend, prompts, widths, k):
    context = backend.prefill(prompts_of(prompts), 0)
    return beam_search(
        Decoding(backend, context, index), prompts=torch.arange(len(prompts)), widths=widths, k=k
    )


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("max_items", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_wide_beams_give_the_greedy_list(seed, level, max_items):
    trie, index, backend, prompts, scores = setting(seed, level, max_items, bool(seed % 2))
    beams = search(index, backend, prompts, (1000, 1000), 8)
    for user in range(len(prompts)):
        want = greedy(scores[user], trie.codes_of_sid, level, max_items, 8)
        found = beams.score[user] > -torch.inf
        assert beams.sid[user][found].tolist() == want


@pytest.mark.parametrize("seed", range(12))
def test_a_certified_narrow_beam_is_the_greedy_list_too(seed):
    level, k = 1 + seed % 2, 3
    trie, index, backend, prompts, scores = setting(seed, level, 1, bool(seed % 3))
    beams = search(index, backend, prompts, (3, 6), k)
    for user in range(len(prompts)):
        kth, pruned = float(beams.score[user, -1]), float(beams.pruned[user])
        found = beams.sid[user][beams.score[user] > -torch.inf].tolist()
        groups = Counter(tuple(trie.codes_of_sid[s][:level].tolist()) for s in found)
        assert max(groups.values()) == 1
        if kth > pruned or pruned == -np.inf:
            assert found == greedy(scores[user], trie.codes_of_sid, level, 1, k)


def test_a_group_cannot_take_the_whole_width():
    """One first code is far better than the others; the list still has k items."""
    codes = np.stack(np.meshgrid(range(5), range(4), range(6)), -1).reshape(-1, 3)
    trie = build_trie(codes.astype(np.int32))

    class Loves(FakeBackend):
        def log_probs(self, context, rows, targets, norm):
            out = super().log_probs(context, rows, targets, norm)
            first = targets.columns.token_ids[0] == bound_space().token_ids[0][0]
            return torch.where((targets.column == 2) & bool(first), out * 0.0, out - 3.0 * first)

    quota = QuotaSettings(level=1, max_items=2)
    index = to_device(trie, bound_space(), "trie", torch.device("cpu"), quota)
    backend = Loves()
    beams = search(index, backend, [[1]], (5, 5), 10)
    found = beams.sid[0][beams.score[0] > -torch.inf].numpy()
    groups = Counter(trie.codes_of_sid[found][:, 0].tolist())
    assert len(found) == 10
    assert set(groups.values()) == {2}
    assert groups[2] == 2


def test_places_count_the_better_ones_of_the_same_row_and_group():
    score = torch.tensor([[-1.0, -3.0, -2.0, -2.0], [-1.0, -1.0, -5.0, -4.0]])
    group = torch.tensor([[7, 7, 7, 8], [1, 1, 1, 2]])
    key = sort_key(score, torch.arange(4).expand(2, 4))
    assert place_in_group(key, group).tolist() == [[0, 2, 1, 0], [0, 1, 2, 0]]
    assert beams_per_group(64, 20, 3) == 9
    assert beams_per_group(4, 20, 3) == 1


@pytest.mark.parametrize("task", [{"score": {}}, {"generate": {"width": 8}, "score": {}}])
def test_published_lists_keep_the_quota(nightshelf, tmp_path, task):
    tables = write_inputs(tmp_path)
    quota = {"level": 1, "max_items": 2}
    config = write_config(tmp_path, task={"k": 8, "quota": quota, **task})
    nightshelf("run", config)
    rows = pl.read_parquet(tmp_path / "out/ds=2026-11-28/surface=home")
    first = pl.from_arrow(tables["catalog"]).select("item_id", pl.col("sid").list.get(0))
    groups = rows.join(first, on="item_id").group_by("user_id", "sid").len()
    assert groups["len"].max() == 2
    assert "deeper than the semantic IDs" in nightshelf(
        "plan", config, "--set", "sid.sizes=[5]", "--set", "sid.tokens=['<a_{code}>']",
        "--set", "task.quota={level: 2, max_items: 1}", check=2,
    ).err  # fmt: skip

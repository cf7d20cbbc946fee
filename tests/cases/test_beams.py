"""CASES A and B: beams return items of the catalog, once each, with the scores they really have."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from transformers import Qwen3ForCausalLM

from engine.backends.fake.backend import FakeBackend
from engine.backends.torch.backend import TorchBackend
from engine.trees.exclusions import dead_nodes
from schemas.requests import Ragged
from tests.cases.backends import BlockedBackend, FlatBackend
from tests.cases.helpers import (
    CPU,
    OpRecorder,
    found_sids,
    index_of,
    pack,
    published,
    score,
    search,
    staged,
    torch_config,
    with_column,
    write,
)
from tests.engine.oracle import Oracle
from tests.factories import (
    bound_space,
    random_codes,
    save_tokenizer,
    tiny_model,
    write_config,
    write_inputs,
)

NORMS = ("full_vocab", "sid_range", "level", "trie")


@pytest.mark.parametrize("width", [1, 2, 5])
def test_every_returned_path_scores_the_same_when_forced(width, model_folder, torch_backend):
    """A17, B11, vllm #31081 and #47126: wrong parents, a chosen token outside the top k."""
    codes = random_codes(np.random.default_rng(7), 60, ragged=True)
    trie, index = index_of(codes)
    oracle = Oracle(model_folder, trie, bound_space(), "full_vocab")
    prompts = [[3, 1, 4], [15, 9], [2, 6, 5, 3]]
    beams = search(torch_backend, index, pack(prompts), width=width, k=6)
    for user, prompt in enumerate(prompts):
        sids = found_sids(beams, user)
        assert sids
        want = [oracle.score(prompt, sid) for sid in sids]
        np.testing.assert_allclose(beams.score[user][: len(sids)], want, rtol=0, atol=1e-5)


def test_a_catalog_of_three_gives_three_and_says_why(nightshelf, tmp_path):
    """A18: more beams than legal items gave duplicates at -1e9 and (-1, -1)."""
    write(tmp_path, "users", {"user_id": ["u1", "u2"], "history": [["a"], []]})
    write(tmp_path, "catalog", {"item_id": list("abc"), "sid": [[0, 1, 2], [0, 1, 3], [4, 0, 0]]})
    config = write_config(
        tmp_path,
        prompt__template="Next: {history}",
        inputs={"users": "users.parquet", "catalog": "catalog.parquet"},
        task={"k": 5, "generate": {"width": 8}},
    )
    summary = nightshelf("run", config, "--output", "json").json
    rows = published(tmp_path)
    for user in ("u1", "u2"):
        mine = rows.filter(pl.col("user_id") == user)
        assert sorted(mine["item_id"]) == ["a", "b", "c"]
        assert mine["rank"].to_list() == [1, 2, 3]
        assert mine["score"].is_between(-100, 0).all()
    outcomes = staged(summary, "outcomes")
    assert outcomes["returned"].to_list() == [3, 3]
    assert outcomes["reason"].to_list() == ["catalog_exhausted"] * 2
    assert outcomes["exact"].all()


def test_a_prefix_without_an_eligible_item_is_dropped_and_never_replaced(torch_backend):
    """A19, MiniOneRec #50: an empty allowed set left a constant mask, which is free text."""
    codes = [[0, 0, 0], [0, 0, 1], [0, 2, 3], [1, 1, 1], [4, 3, 5]]
    trie, index = index_of(codes)
    everything = pack([[3, 1, 4]] * 3)
    gone = Ragged.from_lists([[0, 1, 2], [0, 1, 2, 3, 4], [4]])
    dead = torch.from_numpy(dead_nodes(trie, gone))
    beams = search(torch_backend, index, everything, width=3, k=5, dead=dead)
    left = [{3, 4}, set(), {0, 1, 2, 3}]
    for user, items in enumerate(left):
        sids = found_sids(beams, user)
        assert len(sids) == len(items)
        assert {int(trie.items[trie.first_item[s]]) for s in sids} == items
        assert not (beams.score[user] == 0).any()


@pytest.mark.parametrize("norm", NORMS)
def test_no_score_is_made_up_when_the_model_forbids_every_legal_token(norm):
    """A19, xLLM: all legal logits are -inf. The beam ends; the user beside it is untouched."""
    codes = [[0, 0, 0], [0, 2, 3], [4, 3, 5]]
    _, index = index_of(codes, norm)
    beams = search(BlockedBackend(), index, pack([[3, 33], [3, 5]]), width=4, k=3)
    assert found_sids(beams, 0) == []
    assert (beams.score[0] == -torch.inf).all()
    alone = search(FakeBackend(), index, pack([[3, 5]]), width=4, k=3)
    assert found_sids(beams, 1) == found_sids(alone, 0)
    assert torch.equal(beams.score[1], alone.score[0])


@pytest.mark.parametrize("task", [{"generate": {"width": 8}}, {"score": {}}], ids=lambda t: min(t))
def test_a_user_whose_legal_tokens_are_all_forbidden_costs_only_itself(nightshelf, tmp_path, task):
    """A19: the row is without a result, or in quarantine; the run is not lost for it."""
    tables = write_inputs(tmp_path, num_users=10)
    moods = ["fine"] * 10
    moods[4] = "bad!"
    write(tmp_path, "users", with_column(tables["users"], "mood", moods))
    changes = {"prompt__template": "{mood}{history}", "task": {"k": 5, **task}}
    nightshelf("run", write_config(tmp_path, **changes))
    want = published(tmp_path).filter(pl.col("user_id") != "u004")
    blocked = "tests.cases.backends:blocked_backend"
    config = write_config(tmp_path, engine__backend=blocked, **changes)
    summary = nightshelf("run", config, "--output", "json").json
    assert summary["users_recommended"] == 9
    assert_frame_equal(published(tmp_path), want)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, str]:
    """1000 items in a space of 16 x 16 x 16, and a random model that has its tokens."""
    sizes, folder = (16, 16, 16), tmp_path_factory.mktemp("large")
    model = tiny_model(folder / "model", vocab=80)
    save_tokenizer(folder / "model", sizes)
    tables = write_inputs(folder, num_users=6, num_items=1000)
    codes = random_codes(np.random.default_rng(3), 1000, sizes)
    write(folder, "catalog", with_column(tables["catalog"], "sid", codes.tolist()))
    return folder, model


def test_random_weights_return_no_invalid_id(nightshelf, large):
    """A21, FlashRec: 17 to 27 % of the ids were in no catalog."""
    folder, model = large
    config = torch_config(
        folder, model, sid__sizes=[16, 16, 16], task={"k": 50, "generate": {"width": 64}}
    )
    summary = nightshelf("run", config, "--output", "json").json
    rows = published(folder)
    assert len(rows) == summary["rows_published"] == 6 * 50
    catalog = pl.read_parquet(folder / "catalog.parquet")["item_id"].to_list()
    assert set(rows["item_id"]) <= set(catalog)
    assert rows.group_by("user_id").agg(pl.col("item_id").n_unique())["item_id"].to_list() == (
        [50] * 6
    )


def test_sampling_settings_of_a_checkpoint_are_ignored(nightshelf, tmp_path, model_folder):
    """A22, B7, LC-Rec #17, hf #17812: do_sample of the checkpoint made repeated items."""
    write_inputs(tmp_path, num_users=12)
    rows = []
    sampling = {"do_sample": True, "temperature": 7.5, "top_k": 2, "top_p": 0.3, "num_beams": 3}
    for name, settings in (("plain", None), ("sampling", sampling), ("sampling", sampling)):
        model = tmp_path / name
        shutil.copytree(model_folder, model, dirs_exist_ok=True)
        if settings:
            (model / "generation_config.json").write_text(json.dumps(settings))
        config = torch_config(tmp_path, str(model), task={"k": 6, "generate": {"width": 8}})
        nightshelf("run", config)
        rows.append(published(tmp_path))
        shutil.rmtree(tmp_path / "runs")
    assert not rows[0].select("user_id", "item_id").is_duplicated().any()
    assert_frame_equal(rows[1], rows[0])
    assert_frame_equal(rows[2], rows[0])


def test_wide_beams_end_where_short_ids_end(model_folder, torch_backend):
    """A26, trtllm #13543 and #15621, vllm #7965: never ending, out of bounds at large width."""
    codes = random_codes(np.random.default_rng(11), 300, ragged=True)
    trie, index = index_of(codes)
    assert trie.num_sids < 128, "the beam is wider than the catalog"
    lengths = (trie.codes_of_sid >= 0).sum(axis=1)
    assert set(lengths.tolist()) == {1, 2, 3}
    prompts = pack([[3, 1, 4], [1, 5]])
    beams = search(torch_backend, index, prompts, width=128, k=128)
    assert (beams.nodes == sum(trie.inner_nodes_at[1:])).all()
    oracle = Oracle(model_folder, trie, bound_space(), "full_vocab")
    want = oracle.all_scores([3, 1, 4])
    sids = found_sids(beams, 0)
    assert sorted(sids) == sorted(found_sids(beams, 1)) == list(range(trie.num_sids))
    np.testing.assert_allclose(beams.score[0][: len(sids)], want[sids], rtol=0, atol=1e-5)
    assert (np.diff(want[sids]) <= 1e-5).all(), "best first"


@pytest.mark.parametrize("num_users", [1, 9])
def test_rows_grow_in_proportion_to_the_width_and_host_work_not_at_all(num_users, torch_backend):
    """A32, B8, B12, vllm #14426, #20316, #45815: O(width squared) on the host in each step."""
    full = list(itertools.product(range(5), range(4), range(6)))
    trie, index = index_of(full)
    rows, ops, largest = {}, {}, {}
    for width in (1, 2, 4):
        with OpRecorder() as recorder:
            beams = search(torch_backend, index, pack([[3, 1, 4]] * num_users), width=width, k=8)
        rows[width], ops[width] = int(beams.nodes.max()), recorder.num_ops
        largest[width] = recorder.largest
    assert rows == {1: 2, 2: 4, 4: 8}
    assert max(ops.values()) <= 1.02 * ops[1], "the host does the same work at any width"
    assert largest[4] <= 4 * largest[1]


def test_k_512_forwards_512_nodes_in_each_step():
    """A32: three steps at width 512, by count; two of them are forwarded."""
    sizes = (600, 3, 2)
    full = list(itertools.product(*map(range, sizes)))
    trie, index = index_of(full, sizes=sizes)
    for width in (64, 256, 512):
        with OpRecorder() as recorder:
            beams = search(FlatBackend(), index, pack([[1, 2]] * 2), width=width, k=width)
        assert (beams.nodes == 2 * width).all()
        assert len(found_sids(beams)) == width
        assert recorder.largest < 20 * (2 * width + trie.num_nodes)


def test_tokens_of_another_level_never_starve_the_beam(tmp_path, model_folder):
    """B9, B10, B13, FlashRec 0.1.2, vLLM #47630: wrong tokens filled the pool before the mask."""
    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    space = bound_space()
    with torch.no_grad():  # text and first-level tokens get by far the largest logits
        model.lm_head.weight[: int(space.token_ids[1][0])] *= 30
    model.save_pretrained(tmp_path)
    backend = TorchBackend(str(tmp_path), "float32", CPU)
    codes = random_codes(np.random.default_rng(5), 80)
    trie, index = index_of(codes)
    beams = search(backend, index, pack([[3, 1, 4]]), width=40, k=8)
    sids = found_sids(beams)
    assert len(sids) == len(set(sids)) == 8
    oracle = Oracle(str(tmp_path), trie, space, "full_vocab")
    want = oracle.all_scores([3, 1, 4])
    assert want.max() < -10, "the model itself would say something else"
    np.testing.assert_allclose(
        np.sort(beams.score[0].numpy()), np.sort(want)[-8:], rtol=1e-5, atol=1e-4
    )


def test_a_beam_and_a_scorer_give_an_item_the_same_score_at_any_width(torch_backend):
    """A27: beam log-probability equals scorer log-probability, narrow beams too."""
    codes = random_codes(np.random.default_rng(9), 40)
    trie, index = index_of(codes)
    prompt = pack([[7, 7, 2]], soft={(0, 1): torch.ones(32)})
    items = [trie.items[trie.first_item[s]] for s in range(trie.num_sids)]
    forced = score(torch_backend, index, prompt, [items])
    for width in (1, 3, 100):
        beams = search(torch_backend, index, prompt, width=width, k=5)
        sids = found_sids(beams)
        assert 1 <= len(sids) <= 5
        np.testing.assert_allclose(beams.score[0][: len(sids)], forced[sids], rtol=0, atol=1e-5)

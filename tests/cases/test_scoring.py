"""CASES A: packed scoring gives every user the scores it would have alone."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal

from engine.backends.fake.backend import FakeBackend
from engine.backends.torch.backend import TorchBackend
from tests.cases.helpers import (
    CPU,
    index_of,
    pack,
    published,
    score,
    staged,
    torch_config,
    write,
    write_projector,
)
from tests.engine.oracle import Oracle
from tests.factories import bound_space, write_config, write_inputs

CODES = [[0, 0, 1], [0, 0, 4], [0, 2, 3], [3, 1, 0], [4, 3, 5]]
EVERY = range(len(CODES))
TOLERANCE = 1e-5


@pytest.fixture
def cold(model_folder):
    """A backend that has seen nothing yet."""
    return TorchBackend(model_folder, "float32", CPU)


def vector(seed: int, size: int = 32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_packed_items_get_distinct_scores_equal_to_one_call_each(torch_backend, model_folder):
    """A1, sglang #22544: all packed items got the same score."""
    trie, index = index_of(CODES)
    prompt = [3, 1, 4, 1, 5]
    packed = score(torch_backend, index, pack([prompt]), [EVERY])
    separate = [score(torch_backend, index, pack([prompt]), [[item]])[0] for item in EVERY]
    oracle = Oracle(model_folder, trie, bound_space(), "full_vocab")
    by_definition = [oracle.score(prompt, int(trie.sid_of_item[item])) for item in EVERY]
    np.testing.assert_allclose(packed, separate, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(packed, by_definition, rtol=0, atol=TOLERANCE)
    assert np.diff(np.sort(packed)).min() > 1e-3, "five items, five scores"


def test_a_warm_prefix_gives_the_bits_of_a_cold_one(cold, model_folder):
    """A2, sglang #26618: positions were not rebased after a prefix-cache hit."""
    _, index = index_of(CODES)
    prefix = [int(t) for t in np.random.default_rng(1).integers(0, 20, 64)]
    prompts = pack([[3, 1, 4], [2, 7]], prefix=prefix)
    first = score(cold, index, prompts, [EVERY, EVERY])
    again = score(cold, index, prompts, [EVERY, EVERY])
    np.testing.assert_array_equal(again, first)
    other = pack([[9, 9, 9, 9]], prefix=prefix)  # another user behind the warm prefix
    warm = score(cold, index, other, [EVERY])
    fresh = TorchBackend(model_folder, "float32", CPU)
    np.testing.assert_array_equal(warm, score(fresh, index, other, [EVERY]))
    for changed in (prefix[::-1], prefix[:-1], []):  # a prefix that only resembles the warm one
        again = pack([[9, 9, 9, 9]], prefix=changed)
        fresh = TorchBackend(model_folder, "float32", CPU)
        got = score(cold, index, again, [EVERY])
        np.testing.assert_array_equal(got, score(fresh, index, again, [EVERY]))
        assert np.abs(got - warm).max() > 1e-3


def test_a_user_sharing_64_tokens_with_an_earlier_one_scores_as_when_cold(cold, model_folder):
    """A2, sglang #26618: two users whose histories begin alike."""
    trie, index = index_of(CODES)
    shared = [int(t) for t in np.random.default_rng(2).integers(0, 20, 64)]
    score(cold, index, pack([[*shared, 1, 2]]), [EVERY])
    after = score(cold, index, pack([[*shared, 5]]), [EVERY])
    fresh = TorchBackend(model_folder, "float32", CPU)
    np.testing.assert_array_equal(after, score(fresh, index, pack([[*shared, 5]]), [EVERY]))
    oracle = Oracle(model_folder, trie, bound_space(), "full_vocab")
    want = [oracle.score([*shared, 5], int(trie.sid_of_item[item])) for item in EVERY]
    np.testing.assert_allclose(after, want, rtol=0, atol=TOLERANCE)


def test_scoring_and_generation_in_one_run_leave_each_other_alone(
    nightshelf, tmp_path, model_folder
):
    """A3, sglang #25414 and #25572: a batch with both tasks asserted."""
    tables = write_inputs(tmp_path, num_users=9)
    half = tables["candidates"].slice(0, 5)  # the other users are generated for only
    write(tmp_path, "candidates", half)
    rows = {}
    for name, task in (
        ("score", {"score": {}}),
        ("generate", {"generate": {"width": 200}}),
        ("both", {"score": {}, "generate": {"width": 200}}),
    ):
        config = torch_config(tmp_path, model_folder, task={"k": 100, **task})
        summary = nightshelf("run", config, "--output", "json").json
        assert summary["users_in"] == 9
        rows[name] = published(tmp_path)
    key = ["user_id", "item_id"]
    scored = rows["both"].filter(pl.col("source") == "score")
    generated = rows["both"].filter(pl.col("source") == "generate")
    assert set(scored["user_id"]) == set(half.column("user_id").to_pylist()) & set(
        rows["score"]["user_id"]
    )
    same_score = scored.select(*key, "score").sort(key)
    assert_frame_equal(
        same_score, rows["score"].select(*key, "score").sort(key), abs_tol=TOLERANCE, rel_tol=0
    )
    alone = rows["generate"].join(scored, on=key, how="anti").select(*key, "score").sort(key)
    assert_frame_equal(
        generated.select(*key, "score").sort(key), alone, abs_tol=TOLERANCE, rel_tol=0
    )
    assert generated["user_id"].n_unique() == 9


@pytest.mark.parametrize("kind", ["torch", "fake"])
def test_a_vector_never_reaches_a_user_with_the_same_tokens(kind, torch_backend):
    """A4, sglang #27472: the KV of a soft token was found again under its plain token ids."""
    backend = torch_backend if kind == "torch" else FakeBackend()
    _, index = index_of(CODES)
    tokens, prefix = [3, 0, 5], [1, 2]

    def run(soft=None):
        return score(backend, index, pack([tokens], prefix=prefix, soft=soft), [EVERY])

    plain, with_b = run(), run({(0, 1): vector(2)})
    with_a = run({(0, 1): vector(1)})  # user A, and then the others again behind it
    np.testing.assert_array_equal(run(), plain)
    np.testing.assert_array_equal(run({(0, 1): vector(2)}), with_b)
    for one, two in ((plain, with_a), (plain, with_b), (with_a, with_b)):
        assert np.abs(one - two).max() > 1e-3
    # And side by side in one batch.
    three = pack([tokens] * 3, prefix=prefix, soft={(0, 1): vector(1), (2, 1): vector(2)})
    together = score(backend, index, three, [EVERY] * 3).reshape(3, -1)
    np.testing.assert_allclose(together, [with_a, plain, with_b], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["torch", "fake"])
def test_where_a_vector_stands_is_part_of_the_prompt(kind, torch_backend):
    """A5, vllm #56655: which positions are vectors was not part of the cache key."""
    backend = torch_backend if kind == "torch" else FakeBackend()
    _, index = index_of(CODES)
    tokens = [3, 6, 5, 0, 0, 7]  # a placeholder's token id is 0, and so is a plain token's
    nowhere = score(backend, index, pack([tokens]), [EVERY])
    third = score(backend, index, pack([tokens], soft={(0, 3): vector(1)}), [EVERY])
    fourth = score(backend, index, pack([tokens], soft={(0, 4): vector(1)}), [EVERY])
    for one, two in ((nowhere, third), (nowhere, fourth), (third, fourth)):
        assert np.abs(one - two).max() > 1e-3


def test_the_order_of_input_rows_changes_no_bit(nightshelf, tmp_path, model_folder):
    """A9, vllm #42019 and #42245: scores depended on the order of requests."""
    tables = write_inputs(tmp_path, num_users=20)
    config = torch_config(tmp_path, model_folder)
    nightshelf("run", config)
    want = published(tmp_path)
    rng = np.random.default_rng(4)
    for name, table in tables.items():
        write(tmp_path, name, table.take(rng.permutation(len(table))))
    nightshelf("run", config)
    assert_frame_equal(published(tmp_path), want)
    # The users in three files, in another order again.
    (tmp_path / "users.parquet").unlink()
    (tmp_path / "users").mkdir()
    shuffled = tables["users"].take(rng.permutation(20))
    for part, (begin, length) in enumerate(((0, 13), (13, 1), (14, 6))):
        write(tmp_path / "users", f"part-{9 - part}", shuffled.slice(begin, length))
    nightshelf("run", config, "--set", "inputs.users=users")
    assert_frame_equal(published(tmp_path), want)


def test_batch_sizes_change_no_rank_and_no_score_beyond_rounding(
    nightshelf, tmp_path, model_folder
):
    """A10, vllm #11778, CTranslate2 #1079, sglang #1729: batch size changed scores."""
    write_inputs(tmp_path, num_users=30)
    config = torch_config(tmp_path, model_folder, run__shard_users=1000)
    rows = {}
    for size in (1, 7, 64):
        work = ("--set", f"run.work_dir=runs{size}")  # nothing is taken over from another size
        nightshelf("run", config, *work, "--set", f"engine.max_batch_users={size}")
        rows[size] = published(tmp_path)
    for size in (7, 64):
        assert_frame_equal(rows[size].drop("score"), rows[1].drop("score"))
        assert_frame_equal(rows[size], rows[1], abs_tol=TOLERANCE, rel_tol=0)


def test_equal_scores_are_ordered_by_semantic_id_then_item(nightshelf, tmp_path):
    """A10: the tie-break is stated, not an accident of the sort."""
    items = ["x", "c", "a", "b", "d", "e"]
    sids = [[2, 0, 0], [1, 1, 1], [1, 1, 1], [0, 3, 5], [0, 3, 4], [1, 1, 0]]
    users = pl.DataFrame({"user_id": ["u1", "u2"], "history": [["x"], ["c", "e"]]})
    write(tmp_path, "users", users.to_arrow())
    write(tmp_path, "catalog", {"item_id": items, "sid": sids})
    write(tmp_path, "candidates", {"item_id": items})
    for task in ({"score": {}}, {"generate": {"width": 50}}):
        config = write_config(
            tmp_path,
            engine__backend="tests.cases.backends:flat_backend",
            prompt__template="{history}",
            inputs__exclusions=None,
            task={"k": 5, **task},
        )
        nightshelf("run", config)
        rows = published(tmp_path)
        for user in ("u1", "u2"):
            mine = rows.filter(pl.col("user_id") == user)
            assert mine["item_id"].to_list() == ["d", "b", "e", "a", "c"]
            assert mine["score"].to_list() == [-3.0] * 5


def test_five_repeats_at_full_packing_write_equal_bytes(nightshelf, tmp_path, model_folder):
    """A11, vllm #51187: five repeats gave three results at 44 sequences."""
    import shutil

    write_inputs(tmp_path, num_users=44)
    config = torch_config(
        tmp_path, model_folder, engine__max_batch_tokens=100_000, run__shard_users=1000
    )
    hashes = set()
    for _ in range(5):
        summary = nightshelf("run", config, "--output", "json").json
        (receipt,) = (tmp_path / "runs" / summary["run_id"]).glob("receipts/*.json")
        staged_file = pl.read_json(receipt)["files"][0]["recommendations"]
        assert staged_file["rows"] == summary["rows_published"] > 150
        hashes.add(staged_file["xxh3"])
        shutil.rmtree(tmp_path / "runs")
    assert len(hashes) == 1


@pytest.mark.parametrize("norm", ["full_vocab", "trie"])
def test_a_user_vector_works_in_scoring_and_in_beams_and_they_agree(
    nightshelf, tmp_path, model_folder, norm
):
    """A27, vllm: beams with prompt embeddings were not implemented, scores silently empty."""
    tables = write_inputs(tmp_path, num_users=12)
    everything = tables["catalog"].column("item_id").to_pylist()
    write(tmp_path, "candidates", {"item_id": everything})
    projector = write_projector(tmp_path / "projector")
    rows = {}
    for name, task in (("score", {"score": {}}), ("generate", {"generate": {"width": 200}})):
        config = torch_config(
            tmp_path,
            model_folder,
            engine__projector=projector,
            prompt__template="{user_vector}{history}",
            task={"k": 100, "score_norm": norm, **task},
        )
        summary = nightshelf("run", config, "--output", "json").json
        assert summary["users_recommended"] == 12
        rows[name] = published(tmp_path).sort("user_id", "item_id")
    columns = ["user_id", "item_id", "score"]
    assert_frame_equal(
        rows["generate"].select(columns), rows["score"].select(columns), abs_tol=1e-5, rel_tol=0
    )
    # The vector is used: the same users with other vectors get other scores.
    moved = tables["users"].column("embedding").to_pylist()[::-1]
    write(tmp_path, "users", tables["users"].drop(["embedding"]).append_column(
        "embedding", [moved]))  # fmt: skip
    nightshelf("run", config)
    other = published(tmp_path).sort("user_id", "item_id")
    assert (other["score"] - rows["generate"]["score"]).abs().max() > 0.1


def test_a_shared_prompt_and_shared_prefixes_are_forwarded_once(nightshelf, tmp_path, model_folder):
    """B16, SGLang #81, vLLM #5234: scoring many fixed sequences behind one prompt."""
    tables = write_inputs(tmp_path, num_users=4)
    items, sids = (tables["catalog"].column(c).to_pylist() for c in ("item_id", "sid"))
    write(tmp_path, "candidates", {"item_id": items})
    write(tmp_path, "exclusions", tables["exclusions"].slice(0, 0))
    config = torch_config(tmp_path, model_folder, task={"k": 5, "score": {}})
    summary = nightshelf("run", config, "--output", "json").json
    prefixes = {tuple(s[:1]) for s in sids} | {tuple(s[:2]) for s in sids}
    outcomes = staged(summary, "outcomes")
    assert (outcomes["rows_forwarded"] - outcomes["prompt_tokens"]).to_list() == [len(prefixes)] * 4
    naive = (outcomes["prompt_tokens"] + 3).sum() * len(items)
    assert summary["rows_naive"] == naive > 20 * summary["rows_forwarded"]


def test_a_candidate_of_the_history_is_scored_like_any_other(nightshelf, tmp_path, model_folder):
    """The same SID stands in the prompt and hangs from it; only an exclusion removes it."""
    sids = dict(zip("abcde", CODES, strict=True))
    write(tmp_path, "users", {"user_id": ["u"], "history": [["a", "c"]]})
    write(tmp_path, "catalog", {"item_id": list(sids), "sid": CODES})
    write(tmp_path, "candidates", {"user_id": ["u"], "item_ids": [["c", "a", "e", "c"]]})
    config = torch_config(tmp_path, model_folder, inputs__exclusions=None, task={"score": {}})
    nightshelf("run", config)
    rows = published(tmp_path)
    trie, _ = index_of(CODES)
    oracle = Oracle(model_folder, trie, bound_space(), "full_vocab")
    sid_of = dict(zip("abcde", trie.sid_of_item.tolist(), strict=True))
    prompt = oracle.tokens(sid_of["a"]) + oracle.tokens(sid_of["c"])
    want = {item: oracle.score(prompt, sid_of[item]) for item in "ace"}
    got = dict(zip(rows["item_id"], rows["score"], strict=True))
    assert got == pytest.approx(want, abs=TOLERANCE)
    write(tmp_path, "exclusions", {"user_id": ["u", "u"], "item_id": ["a", "c"]})
    config = torch_config(tmp_path, model_folder, task={"score": {}})
    nightshelf("run", config)
    left = published(tmp_path)
    assert dict(zip(left["item_id"], left["score"], strict=True)) == {"e": got["e"]}

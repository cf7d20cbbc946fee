"""Whole runs: items named by text, labels, embeddings, shared sets, widths, end tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal

from engine.backends.fake.backend import EMBEDDING_WIDTH, fake_log_prob
from tests.cases.helpers import published, staged, torch_config, with_column, write
from tests.engine.oracle import Oracle
from tests.factories import TOKENS, bound_space, random_codes, write_config, write_inputs

PARTITION = "out/ds=2026-11-28/surface=home"


def text_config(folder, **changes):
    """Items have a text and no semantic ID; the prompt is `Hi ` and the latest item's text."""
    changes = {"task": {"k": 5, "score": {}}, "prompt__template": "Hi {history}", **changes}
    changes = {"prompt__history_max_items": 1, **changes}
    return write_config(folder, sid=None, text={"column": "title"}, **changes)


def text_inputs(folder):
    tables = write_inputs(folder)
    catalog = tables["catalog"].drop_columns(["sid"])
    write(folder, "catalog", catalog)
    return {**tables, "catalog": catalog}


def columns(table, key, value):
    """One column by another."""
    return dict(zip(table[key].to_pylist(), table[value].to_pylist(), strict=True))


def as_int64(text: str) -> bytes:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype("<i8").tobytes()


@pytest.mark.parametrize("length_norm", ["sum", "mean"])
def test_text_candidates_are_scored_by_their_tokens(nightshelf, tmp_path, length_norm):
    tables = text_inputs(tmp_path)
    config = text_config(tmp_path, task={"k": 30, "score": {"length_norm": length_norm}})
    nightshelf("catalog", "check", config)
    summary = nightshelf("run", config, "--output", "json").json
    rows = published(tmp_path)
    title = columns(tables["catalog"], "item_id", "title")
    latest = {u: h[-1] for u, h in columns(tables["users"], "user_id", "history").items()}
    assert summary["users_recommended"] > 30
    for row in rows.sample(20, seed=0).iter_rows(named=True):
        prompt = as_int64("Hi " + title[latest[row["user_id"]]])
        tokens = list(title[row["item_id"]].encode())
        steps = [fake_log_prob(prompt, tokens[:n], t) for n, t in enumerate(tokens)]
        want = sum(steps) / (len(steps) if length_norm == "mean" else 1)
        assert row["score"] == pytest.approx(want, abs=1e-3)
        assert row["source"] == "score"


def test_text_candidates_of_a_model_score_as_the_oracle(nightshelf, tmp_path, model_folder):
    """The tokenizer of a checkpoint, prompts and texts joined without anything between them."""
    from engine.trees.sid_trie import build_trie
    from schemas.semantic_ids import TextTokens

    tables = write_inputs(tmp_path, num_users=4)
    codes = random_codes(np.random.default_rng(0), 60)
    codes[np.arange(3) >= (np.arange(60) % 3 + 1)[:, None]] = -1  # texts that begin others
    words = [
        "".join(TOKENS[lv].format(code=c) for lv, c in enumerate(row) if c >= 0) for row in codes
    ]
    catalog = with_column(tables["catalog"].drop_columns(["sid"]), "text", words)
    write(tmp_path, "catalog", catalog)
    config = torch_config(tmp_path, model_folder, sid=None, text={}, task={"k": 50, "score": {}})
    nightshelf("run", config, "--set", "prompt.template='{segment}{text:segment}'")
    table = bound_space().table
    ids = np.where(codes >= 0, table[np.arange(3), np.maximum(codes, 0)], -1).astype(np.int32)
    trie = build_trie(ids, prefixes=True)
    oracle = Oracle(model_folder, trie, TextTokens(64, 3), "full_vocab")
    order = {item: i for i, item in enumerate(tables["catalog"]["item_id"].to_pylist())}
    rows = published(tmp_path)
    assert len(rows) > 10
    for row in rows.iter_rows(named=True):
        prompt = [0, 0]  # the segments s0, s1, s2 are no words: w0
        want = oracle.score(prompt, int(trie.sid_of_item[order[row["item_id"]]]))
        assert row["score"] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(
    ("titles", "words"),
    [
        ({3: None}, "title is null"),
        ({3: ""}, "has no token"),
        ({3: "x" * 65}, "is too long"),
    ],
)
def test_a_text_that_cannot_name_its_item_is_refused(nightshelf, tmp_path, titles, words):
    tables = text_inputs(tmp_path)
    column = tables["catalog"]["title"].to_pylist()
    for row, value in titles.items():
        column[row] = value
    write(tmp_path, "catalog", with_column(tables["catalog"], "title", column))
    done = nightshelf("run", text_config(tmp_path), check=3)
    assert words in done.err
    assert words in nightshelf("catalog", "check", text_config(tmp_path), check=3).out
    assert '"i003"' in done.err or "'i003'" in done.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": {"generate": {}}}, "task.generate needs semantic IDs"),
        ({"task": {"score": {}, "score_norm": "level"}}, "task.score_norm needs semantic IDs"),
        ({"task": {"score": {}, "collisions": "first"}}, "task.collisions needs semantic IDs"),
        ({"prompt__template": "{user_sid}"}, "there is no sid section"),
    ],
)
def test_what_needs_semantic_ids_says_so(nightshelf, tmp_path, changes, words):
    text_inputs(tmp_path)
    assert words in nightshelf("plan", text_config(tmp_path, **changes), check=2).err


def test_mean_is_refused_where_generation_sums(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, task={"score": {"length_norm": "mean"}})
    assert "is for items named by text" in nightshelf("plan", config, check=2).err


# --- labels ---------------------------------------------------------------------------------------


def label_config(folder, **label):
    return write_config(folder, task={"k": 30, "label": {"labels": ["y", "n"], **label}})


@pytest.mark.parametrize("softmax", [True, False])
def test_labels_rank_candidates_by_the_first_one(nightshelf, tmp_path, softmax):
    tables = write_inputs(tmp_path)
    config = label_config(tmp_path, softmax=softmax, suffix="?")
    summary = nightshelf("run", config, "--output", "json").json
    rows = published(tmp_path)
    assert summary["candidates_scored"] == len(rows) > 0
    assert set(rows["source"]) == {"label"}
    codes = columns(tables["catalog"], "item_id", "sid")
    first = np.cumsum([256, 5, 4])  # SID tokens follow the bytes
    spec = {"prompt__template": "Hi"}
    config = write_config(
        tmp_path,
        task={"k": 30, "label": {"labels": ["y", "n"], "softmax": softmax, "suffix": "?"}},
        **spec,
    )
    nightshelf("run", config)
    for row in published(tmp_path).sample(15, seed=1).iter_rows(named=True):
        path = [int(f + c) for f, c in zip(first, codes[row["item_id"]], strict=True)] + [ord("?")]
        logits = [fake_log_prob(as_int64("Hi"), path, ord(label)) for label in "yn"]
        total = math.log(sum(math.exp(x) for x in logits)) if softmax else 0.0
        want = [x - total for x in logits]
        assert [one["label"] for one in row["labels"]] == ["y", "n"]
        assert [one["score"] for one in row["labels"]] == pytest.approx(want, abs=1e-4)
        assert row["score"] == row["labels"][0]["score"]


def test_a_user_may_have_labels_of_its_own(nightshelf, tmp_path):
    tables = write_inputs(tmp_path, num_users=6)
    own = [["a", "b", "c"], None, ["b", "a"], [], ["no", "a"], ["a", "a"]]
    write(tmp_path, "users", with_column(tables["users"], "mine", own))
    config = label_config(tmp_path, labels_column="mine")
    summary = nightshelf("run", config, "--output", "json").json
    rows = published(tmp_path)
    got = {
        user: [one["label"] for one in labels]
        for user, labels in zip(rows["user_id"], rows["labels"].to_list(), strict=True)
    }
    assert got["u000"] == ["a", "b", "c"]
    assert got["u001"] == got["u003"] == ["y", "n"]
    assert got["u002"] == ["b", "a"]
    bad = staged(summary, "quarantine").filter(pl.col("table") == "users")
    assert dict(zip(bad["key"], bad["rule"], strict=True)) == {
        "u004": "label_unknown",
        "u005": "label_twice",
    }
    assert "'no'" in bad.filter(pl.col("key") == "u004")["message"][0]
    for row in rows.iter_rows(named=True):
        assert sum(math.exp(one["score"]) for one in row["labels"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_labels_may_be_token_ids_of_the_model(nightshelf, tmp_path, model_folder, count):
    """A6: ids that were added behind the base vocabulary are labels like any other."""
    write_inputs(tmp_path, num_users=3)
    labels = {"labels": [63, 20][:count], "softmax": count > 1}
    config = torch_config(tmp_path, model_folder, task={"k": 4, "label": labels})
    nightshelf("run", config)
    rows = published(tmp_path)
    assert len(rows) > 3
    assert (rows["score"] < 0).all()
    labels["labels"] = [64, 20]
    config = torch_config(tmp_path, model_folder, task={"k": 4, "label": labels})
    done = nightshelf("run", config, check=2)
    assert "ids below 64" in done.err
    assert "got 64" in done.err


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ({"labels": ["yes"], "softmax": False}, "not one token"),
        ({"labels": ["y"]}, "softmax over one label"),
        ({"labels": ["y", "y"]}, "stands twice"),
    ],
)
def test_labels_that_cannot_be_asked_are_refused(nightshelf, tmp_path, label, words):
    write_inputs(tmp_path)
    config = write_config(tmp_path, task={"label": label})
    assert words in nightshelf("plan", config, check=2).err


def test_labels_stand_in_the_wide_layout_too(nightshelf, tmp_path):
    write_inputs(tmp_path, num_users=5)
    config = label_config(tmp_path)
    nightshelf("run", config, "--set", "output.layout=wide")
    rows = pl.read_parquet(tmp_path / PARTITION)
    items = rows.explode("items").unnest("items")
    assert items["labels"].list.len().unique().to_list() == [2]


# --- embeddings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_of_prompts_are_a_table(nightshelf, tmp_path, model_folder, pooling):
    tables = write_inputs(tmp_path, num_users=25)
    embed = {"pooling": pooling, "normalize": pooling == "mean"}
    config = torch_config(tmp_path, model_folder, task={"embed": embed})
    summary = nightshelf("run", config, "--output", "json").json
    assert summary["users_embedded"] == summary["rows_published"] == 25
    rows = pl.read_parquet(tmp_path / PARTITION, hive_partitioning=False).sort("user_id")
    assert rows.columns == ["user_id", "embedding", "run_id"]
    assert rows["user_id"].to_list() == tables["users"]["user_id"].to_pylist()
    vectors = rows["embedding"].to_numpy()
    assert vectors.shape == (25, 32)
    from engine.trees.sid_trie import build_trie
    from tests.factories import bound_space

    codes = np.asarray(tables["catalog"]["sid"].to_pylist(), dtype=np.int32)
    trie = build_trie(codes)
    oracle = Oracle(model_folder, trie, bound_space(), "full_vocab")
    order = {item: i for i, item in enumerate(tables["catalog"]["item_id"].to_pylist())}
    for user, history in enumerate(tables["users"]["history"].to_pylist()):
        prompt = [t for i in history for t in oracle.tokens(int(trie.sid_of_item[order[i]]))]
        want = oracle.embed(prompt, pooling)
        if embed["normalize"]:
            want = want / np.linalg.norm(want)
        np.testing.assert_allclose(vectors[user], want, rtol=0, atol=1e-5)


def test_embeddings_need_no_items(nightshelf, tmp_path):
    """No catalog, no semantic IDs, no candidates: users and a template."""
    write_inputs(tmp_path, num_users=12)
    (tmp_path / "catalog.parquet").unlink()
    inputs = {"users": "users.parquet"}
    changes = {"sid": None, "inputs": inputs, "task": {"embed": {}}}
    config = write_config(tmp_path, **changes, prompt__template="I am {user_vector} of {segment}")
    first = nightshelf("run", config, "--output", "json").json
    assert (first["users_embedded"], first["rows_published"]) == (12, 12)
    rows = pl.read_parquet(tmp_path / PARTITION)
    assert rows["embedding"].dtype == pl.Array(pl.Float32, EMBEDDING_WIDTH)
    again = nightshelf("run", config, "--output", "json").json
    assert again["run_id"] == first["run_id"]
    assert_frame_equal(pl.read_parquet(tmp_path / PARTITION), rows)
    shown = nightshelf("show", config, "--user", "u003")
    assert f"embedding of {EMBEDDING_WIDTH} numbers" in shown.out
    as_json = nightshelf("show", config, "--user", "u003", "--output", "json").json
    want = rows.filter(pl.col("user_id") == "u003")["embedding"][0].to_list()
    assert as_json["embedding"] == want
    assert "embedded" in nightshelf("run", config).out


def test_a_user_that_cannot_be_embedded_is_quarantined(nightshelf, tmp_path):
    tables = write_inputs(tmp_path, num_users=12)
    vectors = tables["users"]["embedding"].to_pylist()
    vectors[4] = [math.nan] * 4
    write(tmp_path, "users", with_column(tables["users"], "embedding", vectors))
    config = write_config(tmp_path, task={"embed": {}})
    summary = nightshelf("run", config, "--output", "json").json
    assert (summary["users_embedded"], summary["users_quarantined"]) == (11, 1)
    assert "u004" not in pl.read_parquet(tmp_path / PARTITION)["user_id"].to_list()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": {"embed": {}, "score": {}}}, "or 'embed: {…}'"),
        ({"task": {"embed": {}, "k_column": "k"}}, "task.k_column has no meaning for embed"),
        ({"task": {"embed": {}}, "output__layout": "wide"}, "no wide layout"),
        ({"task": {"embed": {}}, "inputs__catalog": None}, "inputs.catalog is missing"),
        ({"task": {"embed": {}}, "sid": None}, "nothing names the items"),
    ],
)
def test_settings_that_do_not_go_with_embeddings_are_refused(nightshelf, tmp_path, changes, words):
    write_inputs(tmp_path)
    assert words in nightshelf("plan", write_config(tmp_path, **changes), check=2).err


# --- shared candidate sets ------------------------------------------------------------------------


@pytest.mark.parametrize("by_segment", [False, True], ids=["shared by all", "by segment"])
@pytest.mark.parametrize("generate", [False, True], ids=["score", "both"])
def test_a_shared_set_gives_the_rows_of_sets_written_out(
    nightshelf, tmp_path, by_segment, generate
):
    """Excluded and ineligible items, unknown and repeated ones included; counts agree too."""
    tables = write_inputs(tmp_path)
    rng = np.random.default_rng(3)
    items = tables["catalog"]["item_id"].to_pylist()
    shelf = [[items[i] for i in rng.integers(0, 60, 25)] + ["nowhere"] for _ in range(3)]
    catalog = with_column(tables["catalog"], "market", [f"s{i % 3}" for i in range(60)])
    write(tmp_path, "catalog", catalog)
    segments = tables["users"]["segment"].to_pylist()
    if by_segment:  # the third segment has no set
        shared = {"segment": ["s0", "s1"], "item_ids": shelf[:2]}
        lists = {"s0": shelf[0], "s1": shelf[1], "s2": []}
    else:
        shared = {"item_id": shelf[0]}
        lists = dict.fromkeys(["s0", "s1", "s2"], shelf[0])
    task = {"k": 8, "score": {}, "eligibility": "market != {user.segment}"}
    task |= {"generate": {"width": 4}} if generate else {}
    config = write_config(tmp_path, task=task)
    users = tables["users"]["user_id"].to_pylist()
    wide = {
        "user_id": users,
        "item_ids": pa.array([lists[s] for s in segments], pa.list_(pa.string())),
    }
    write(tmp_path, "candidates", wide)
    want_summary = nightshelf("run", config, "--output", "json").json
    want = published(tmp_path)
    want_counts = manifest_counts(want_summary)
    write(tmp_path, "candidates", shared)
    got_summary = nightshelf("run", config, "--output", "json").json
    assert_frame_equal(published(tmp_path), want)
    counts = manifest_counts(got_summary)
    names = [n for n in counts if n.startswith(("candidates_", "users_"))]
    assert {n: counts[n] for n in names} == {n: want_counts[n] for n in names}
    assert counts["candidates_excluded"] > 0
    assert counts["candidates_ineligible"] > 0
    unknown = staged(got_summary, "quarantine").filter(pl.col("rule") == "unknown_item")
    assert len(unknown) == (2 if by_segment else 1), "once, not for every user"


def manifest_counts(summary):
    return json.loads((Path(summary["run_dir"]) / "manifest.json").read_text())["counts"]


def test_a_shared_sets_tree_is_built_once(nightshelf, tmp_path, monkeypatch):
    import engine.trees.candidate_trees

    tables = write_inputs(tmp_path)
    write(tmp_path, "candidates", {"item_id": tables["catalog"]["item_id"].to_pylist()})
    sizes = []
    build = engine.trees.candidate_trees.build_token_tree

    def counted(trie, candidates, **options):
        sizes.append(candidates.num_rows)
        return build(trie, candidates, **options)

    monkeypatch.setattr("engine.trees.candidate_trees.build_token_tree", counted)
    monkeypatch.setattr("engine.scoring.items.build_token_tree", counted)
    config = write_config(tmp_path, task={"k": 5, "score": {}}, engine__max_batch_users=3)
    summary = nightshelf("run", config, "--output", "json").json
    assert summary["shards"] == 4
    assert summary["users_recommended"] == 40
    assert sizes == [2], "one shared set and the empty one, for four shards of many packs"


# --- widths and end tokens ------------------------------------------------------------------------


def test_the_summary_says_which_widths_were_used(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(
        tmp_path,
        task={
            "k": 1,
            "score_norm": "trie",
            "generate": {"search": "beam", "width": 2, "exact": True},
        },
    )
    summary = nightshelf("run", config, "--output", "json").json
    widths = {int(width): users for width, users in summary["beam_widths"].items()}
    assert sum(widths.values()) == 40
    assert min(widths) >= 2
    assert len(widths) > 1, "some users needed a wider beam"
    assert all(width & (width - 1) == 0 for width in widths)
    assert summary["exact_share"] == 1.0
    assert "beam widths" in nightshelf("run", config).out
    narrow = nightshelf(
        "run", config, "--set", "task.generate.exact=false", "--output", "json"
    ).json
    assert narrow["beam_widths"] == {"2": 40}
    assert narrow["exact_share"] < 1.0


@pytest.mark.parametrize("end_after", ["prefix", "every"])
def test_an_end_token_lets_one_id_be_the_beginning_of_another(nightshelf, tmp_path, end_after):
    tables = write_inputs(tmp_path)
    sids = tables["catalog"]["sid"].to_pylist()
    sids[7], sids[8] = sids[9][:1], sids[9][:2]
    write(tmp_path, "catalog", with_column(tables["catalog"], "sid", sids))
    plain = write_config(tmp_path)
    assert "prefix of another" in nightshelf("run", plain, check=3).err
    assert "prefix_conflict" in nightshelf("catalog", "check", plain, check=3).out
    config = write_config(
        tmp_path,
        sid__end_token="<end>",
        sid__end_after=end_after,
        task={"k": 60, "score": {}, "generate": {"width": 300}},
        inputs__exclusions=None,
    )
    nightshelf("catalog", "check", config)
    assert "end" not in nightshelf("catalog", "stats", config).err
    summary = nightshelf("run", config, "--output", "json").json
    rows = published(tmp_path)
    assert summary["exact_share"] == 1.0
    assert rows.group_by("user_id").len()["len"].unique().to_list() == [60]
    both = published(tmp_path)
    nightshelf("run", config, "--set", "task.score=null")
    generated = published(tmp_path)
    on = ["user_id", "item_id"]
    joined = both.join(generated, on=on)
    assert (joined["score"] == joined["score_right"]).all()
    assert len(joined) == len(rows)

"""CASES A: what goes into a prompt, what is dropped from it, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from tokenizers import AddedToken, Tokenizer, models, processors

from engine.prompts.builder import PromptBuilder
from engine.prompts.tokenizer import CheckpointTokenizer
from pipelines.catalog.build import read_text_catalog
from schemas.requests import Ragged, UserBatch
from schemas.settings import PromptSettings, TextSettings
from tests.cases.helpers import (
    index_of,
    published,
    staged,
    torch_config,
    with_column,
    write,
)
from tests.factories import sid_space, write_config, write_inputs

SMALL = {"a": [0, 1, 2], "b": [0, 1, 3], "c": [4, 0, 0]}


def write_small(folder: Path, users: dict, candidates: dict | None = None) -> None:
    """Three items; the candidates are all of them unless given."""
    write(folder, "users", users)
    write(folder, "catalog", {"item_id": list(SMALL), "sid": list(SMALL.values())})
    write(folder, "candidates", candidates or {"item_id": list(SMALL)})


def test_a_long_history_loses_its_oldest_items_and_no_candidate(nightshelf, tmp_path, model_folder):
    """A7, vllm #34539: every candidate was cut off, all scores were equal, HTTP 200."""
    latest = list("abcabcabca")
    history = [*"cbac", *latest]  # 42 tokens, 32 allowed, 10 items of 3 tokens fit
    changes = {"inputs__exclusions": None, "task": {"k": 3, "score": {}}}
    rows = {}
    for name, items in (("cut", history), ("kept", latest), ("short", latest[1:])):
        write_small(tmp_path, {"user_id": ["u"], "history": [items]})
        config = torch_config(tmp_path, model_folder, **changes)
        args = ("--set", "prompt.max_tokens=32", "--output", "json")
        summary = nightshelf("run", config, *args).json
        rows[name] = published(tmp_path)
        dropped = 12 if name == "cut" else 0
        assert staged(summary, "outcomes")["truncated_tokens"].to_list() == [dropped]
        assert summary["truncated_tokens"] == dropped
    assert rows["cut"]["score"].n_unique() == len(rows["cut"]) == 3
    assert_frame_equal(rows["cut"], rows["kept"])
    assert (rows["kept"]["score"] - rows["short"]["score"]).abs().max() > 1e-3


def test_a_history_of_1100_tokens_is_cut_and_counted(nightshelf, tmp_path):
    """A8, CTranslate2: a default length of 1024 was applied without a word."""
    history = [*"bc" * 183, "a"]  # 367 items, 1101 tokens
    users = {"user_id": ["u", "v"], "history": [history, history[-341:]]}
    write_small(tmp_path, users)
    config = write_config(
        tmp_path,
        prompt={"template": "{history}", "history_max_items": 400},
        inputs__exclusions=None,
        task={"k": 3, "score": {}, "generate": {"width": 4}},
    )
    summary = nightshelf("run", config, "--output", "json").json
    outcomes = staged(summary, "outcomes").sort("user_id")
    assert outcomes["truncated_tokens"].to_list() == [3 * 26, 0]
    assert outcomes["prompt_tokens"].to_list() == [1023, 1023]
    assert summary["truncated_tokens"] == 78
    by_user = published(tmp_path).partition_by("user_id", include_key=False)
    assert_frame_equal(*by_user)


def test_one_prompt_too_long_by_a_token_costs_one_row(nightshelf, tmp_path):
    """C1, ray #59194: one over-long prompt killed the job."""
    tables = write_inputs(tmp_path, num_users=10)
    bios = ["b" * n for n in range(10)]
    bios[3], bios[6] = "x" * 61, "x" * 60  # with "Hi ", 64 and 63 tokens
    write(tmp_path, "users", with_column(tables["users"], "bio", bios))
    config = write_config(tmp_path, prompt={"template": "Hi {bio}{history}", "max_tokens": 63})
    summary = nightshelf("run", config, "--output", "json").json
    assert (summary["users_quarantined"], summary["users_recommended"]) == (1, 9)
    bad = staged(summary, "quarantine")
    assert bad.select("key", "rule").rows() == [("u003", "prompt_too_long")]
    assert "64 tokens" in bad["message"][0]
    assert set(published(tmp_path)["user_id"]) == {f"u{i:03d}" for i in range(10) if i != 3}


@pytest.mark.parametrize(
    ("template", "column", "values", "rule"),
    [
        ("{history}", "history", [["a"], [], ["b"]], "empty_prompt"),
        ("{user_vector}", "embedding", [[1.0, 2], [3, np.nan], [5, 6]], "vector_not_finite"),
        ("{user_sid}", "user_sid", [[1, 0, 5], [1, 4, 5], [0, 3, 0]], "user_sid_codes"),
        ("{user_sid}", "user_sid", [[1, 0, 5], [1, 0], [0, 3, 0]], "user_sid_codes"),
    ],
    ids=["empty history", "NaN vector", "id out of range", "half an id"],
)
def test_a_poison_row_is_set_aside_with_a_code(
    nightshelf, tmp_path, template, column, values, rule
):
    """A24, OpenOneRec: a failed batch became the empty text with log-probability 0."""
    ids = ["u1", "u2", "u3"]
    config = write_config(
        tmp_path,
        prompt__template=template,
        inputs={"users": "users.parquet", "catalog": "catalog.parquet"},
        task={"k": 3, "generate": {"width": 8}},
    )
    write_small(tmp_path, {"user_id": ids[::2], column: values[::2]})
    nightshelf("run", config)
    want = published(tmp_path)
    assert want["user_id"].n_unique() == 2
    write_small(tmp_path, {"user_id": ids, column: values})
    summary = nightshelf("run", config, "--output", "json").json
    assert_frame_equal(published(tmp_path), want)
    assert staged(summary, "quarantine").select("key", "rule").rows() == [("u2", rule)]
    assert (published(tmp_path)["score"] < 0).all()


def test_tokens_are_counted_per_user_and_in_total(nightshelf, tmp_path):
    """A34, sglang #18132: token usage was missing. Here every number is worked out by hand."""
    users = {"user_id": ["u1", "u2", "u3"], "history": [["a"], ["a", "b", "c"], []]}
    candidates = {"user_id": ["u1", "u2"], "item_ids": [["a", "b", "c"], ["a"]]}
    write_small(tmp_path, users, candidates)
    config = write_config(
        tmp_path,
        prompt__template="Hi {history}",
        inputs__exclusions=None,
        task={"k": 3, "score": {}, "generate": {"width": 1, "search": "beam"}},
    )
    summary = nightshelf("run", config, "--output", "json").json
    outcomes = staged(summary, "outcomes").sort("user_id")
    # Prompts: "Hi " and three tokens per item; its first two tokens are shared by all users.
    assert outcomes["prompt_tokens"].to_list() == [6, 12, 3]
    # Forwarded: the rest of the prompt, the candidates' prefixes (0, 01, 4, 40 and 0, 01), and one
    # beam in each of two levels.
    assert outcomes["rows_forwarded"].to_list() == [4 + 4 + 2, 10 + 2 + 2, 1 + 0 + 2]
    assert outcomes["reused_tokens"].to_list() == [2, 2, 2]
    assert (summary["prompt_tokens"], summary["reused_tokens"]) == (21, 6)
    assert summary["rows_forwarded"] == 27
    # One by one: 3 candidates and 1 beam for u1, 1 and 1 for u2, a beam alone for u3.
    assert summary["rows_naive"] == 3 * (6 + 3) + (6 + 2) + (12 + 3) + (12 + 2) + (3 + 2)


@pytest.fixture
def joining_tokenizer(tmp_path) -> CheckpointTokenizer:
    """BPE in which "ab" is one token, that adds <s> in front of every text it is given."""
    characters = "abAs<>_0123456789"
    vocab = {c: i for i, c in enumerate(characters)} | {"ab": 17, "<s>": 18, "sp": 19}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b")], unk_token="A"))
    tokenizer.add_special_tokens(["<s>"])
    space = sid_space()
    sids = [space.token(lv, c) for lv, size in enumerate(space.sizes) for c in range(size)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in sids])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 18)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("ab").ids == [18, 17]
    return CheckpointTokenizer(str(tmp_path))


def build(tokenizer, template: str, texts: list[str], histories: list[list[int]]):
    trie, _ = index_of(list(SMALL.values()))
    space = sid_space().bind(tokenizer.token_id)
    builder = PromptBuilder(PromptSettings(template=template), tokenizer, space, trie, 1)
    users = UserBatch(
        num_users=len(texts), texts={"t": texts}, history=Ragged.from_lists(histories)
    )
    prompts = builder.build(users)
    assert not prompts.rejections
    prefix = prompts.static_prefix.tolist()
    return [prefix + prompts.tokens.row(user).tolist() for user in range(len(texts))]


def test_template_pieces_are_tokenised_apart_and_joined(joining_tokenizer):
    """A30: joint and separate tokenisation differ at the seam; the declared rule is separate."""
    sids = [joining_tokenizer.token_id(t) for t in ("<a_0>", "<b_1>", "<c_3>")]
    a, b, ab, bos = 0, 1, 17, 18
    (joined,) = build(joining_tokenizer, "a{text:t}{history}", ["bab"], [[1]])
    assert joined == [a, b, ab, *sids]
    (with_bos,) = build(joining_tokenizer, "<s>ab{text:t}b", ["<s>a"], [[]])
    # <s> of the template is the special token; a user's <s> is three characters.
    assert with_bos == [bos, ab, *(4, 3, 5), a, b]


def test_a_prompt_has_the_same_tokens_alone_and_in_a_batch(joining_tokenizer):
    """A30: packed and unpacked token ids are equal; no BOS in front of any user or item."""
    texts = ["ab", "", "b", "aab"]
    histories = [[0, 1, 2], [], [2], [1, 1]]
    template = "ab{text:t}a{history}b"
    together = build(joining_tokenizer, template, texts, histories)
    alone = [
        build(joining_tokenizer, template, [text], [history])[0]
        for text, history in zip(texts, histories, strict=True)
    ]
    assert together == alone
    assert not any(18 in prompt for prompt in together)


def test_a_text_item_is_tokenised_on_its_own_whatever_stands_before_it(joining_tokenizer, tmp_path):
    """A30: "b" behind a prompt that ends in "a" stays "b"; one rule, packed or not, and no BOS."""
    write(tmp_path, "c", {"item_id": ["x", "y", "z"], "text": ["b", "ab", "aab"]})
    catalog = read_text_catalog(
        [str(tmp_path / "c.parquet")], TextSettings(), joining_tokenizer, vocab_size=None
    )
    codes = catalog.trie.codes_of_sid[catalog.trie.sid_of_item]
    assert [[c for c in row if c >= 0] for row in codes.tolist()] == [[1], [17], [0, 17]]


def test_an_empty_piece_after_the_shared_prefix_rejects_nobody(tmp_path, nightshelf, model_folder):
    """A24, A30: a template that ends in text without a token can still predict from its prefix."""
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(model_folder).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    spec = json.loads((model / "tokenizer.json").read_text())
    spec["pre_tokenizer"] = {"type": "Whitespace"}
    (model / "tokenizer.json").write_text(json.dumps(spec))
    write_small(tmp_path, {"user_id": ["u", "v"], "history": [["a"], []]})
    config = torch_config(tmp_path, str(model), inputs__exclusions=None, task={"k": 3, "score": {}})
    want = None
    for template in ("w1 w2{history}", "w1 w2{history} "):
        summary = nightshelf("run", config, "--set", f"prompt.template='{template}'", "--output",
                             "json").json  # fmt: skip
        assert summary["users_quarantined"] == 0
        rows = published(tmp_path)
        assert_frame_equal(rows, rows if want is None else want, abs_tol=1e-5, rel_tol=0)
        want = rows
    assert sorted(want["user_id"].unique()) == ["u", "v"]
    assert want.group_by("user_id").agg(pl.len())["len"].to_list() == [3, 3]

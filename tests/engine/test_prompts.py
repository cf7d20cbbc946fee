from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prompts.builder import PromptBuilder
from engine.prompts.tokenizer import ByteTokenizer
from engine.trees.sid_trie import build_trie
from schemas.requests import Ragged, UserBatch
from schemas.settings import PromptSettings
from tests.factories import random_codes, sid_space

SPACE = sid_space()
TOKENIZER = ByteTokenizer(SPACE)
BOUND = SPACE.bind(TOKENIZER.token_id)


def sid_tokens(codes):
    return [TOKENIZER.token_id(SPACE.token(lv, c)) for lv, c in enumerate(codes) if c >= 0]


def reference(template_parts, settings, codes, history, text):
    """One prompt in plain Python: drop the oldest items until it fits."""
    items = history[-settings.history_max_items :]
    separator = list(settings.history_separator.encode())
    while True:
        out = []
        for part in template_parts:
            if part == "{history}":
                for i, item in enumerate(items):
                    out += sid_tokens(codes[item]) + (separator if i < len(items) - 1 else [])
            elif part == "{text:bio}":
                out += list(text.encode())
            elif part == "{user_vector}":
                out += [0, 0]
            else:
                out += list(part.encode())
        if len(out) <= settings.max_tokens or not items:
            return out
        items = items[1:]


PARTS = [
    ["Hi ", "{user_vector}", " saw ", "{history}", " and ", "{text:bio}", "."],
    ["{history}", "{user_vector}"],
    ["static ", "{history}"],
    ["{text:bio}", "{history}"],
]


@given(
    st.integers(0, 10_000),
    st.sampled_from(range(len(PARTS))),
    st.integers(8, 60),
    st.integers(1, 6),
    st.sampled_from(["", ", "]),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_prompts_equal_the_plain_builder(seed, which, max_tokens, max_items, separator, ragged):
    rng = np.random.default_rng(seed)
    codes = random_codes(rng, 20, ragged=ragged)
    config = PromptSettings(
        template="".join(PARTS[which]),
        max_tokens=max_tokens,
        history_max_items=max_items,
        history_separator=separator,
    )
    history = [rng.integers(0, 20, rng.integers(0, 9)).tolist() for _ in range(5)]
    texts = ["x" * int(n) for n in rng.integers(0, 20, 5)]
    users = UserBatch(
        num_users=5,
        vectors=np.zeros((5, 3), dtype=np.float32),
        history=Ragged.from_lists(history),
        texts={"bio": texts},
    )
    builder = PromptBuilder(config, TOKENIZER, BOUND, build_trie(codes), 2)
    got = builder.build(users)
    rejected = {r.user: r.rule for r in got.rejections}
    for user in range(5):
        want = reference(PARTS[which], config, codes, history[user], texts[user])
        mine = [*got.static_prefix.tolist(), *got.tokens.row(user).tolist()]
        assert mine == want
        if len(want) > max_tokens:
            assert rejected.pop(user) == "prompt_too_long"
        elif not want:
            assert rejected.pop(user) == "empty_prompt"
        else:
            assert len(got.tokens.row(user)) >= 1, "one token of its own to predict from"
        kept_all = reference(
            PARTS[which], config.model_copy(update={"max_tokens": 10**6}), codes,
            history[user], texts[user],
        )  # fmt: skip
        assert got.truncated[user] == len(kept_all) - len(want)
        if "{user_vector}" in PARTS[which]:
            start = int(got.soft_start[user]) + len(got.static_prefix)
            before = PARTS[which][: PARTS[which].index("{user_vector}")]
            head = reference(before, config, codes, history[user], texts[user]) if before else []
            if user not in {r.user for r in got.rejections} and "{history}" not in before:
                assert start == len(head)
    assert not rejected


def build(template, **settings):
    codes = random_codes(np.random.default_rng(0), 10)
    config = PromptSettings(template=template, **settings)
    return PromptBuilder(config, TOKENIZER, BOUND, build_trie(codes), 1), codes


def test_static_text_before_the_first_slot_is_shared():
    builder, _ = build("You are a shelf. {text:bio} end")
    assert bytes(builder.static_prefix.tolist()) == b"You are a shelf. "
    got = builder.build(UserBatch(num_users=2, texts={"bio": ["a", "bc"]}))
    assert bytes(got.tokens.row(1).tolist()) == b"bc end"
    assert got.lengths.tolist() == [22, 23]


def test_segments_are_tokenised_apart_and_without_beginning_token():
    builder, codes = build("a{history}b")
    got = builder.build(UserBatch(num_users=1, history=Ragged.from_lists([[3]])))
    assert got.tokens.row(0).tolist() == [*sid_tokens(codes[3]), 98]


def test_user_sids_become_their_tokens():
    builder, _ = build("{user_sid}")
    got = builder.build(UserBatch(num_users=2, user_sids=Ragged.from_lists([[1, 2, 3], []])))
    assert got.tokens.row(0).tolist() == sid_tokens([1, 2, 3])
    assert [r.rule for r in got.rejections] == ["empty_prompt"]


@pytest.mark.parametrize(("room", "kept"), [(9, 3), (8, 2), (6, 2), (5, 1), (3, 1), (2, 0)])
def test_whole_items_go_and_the_oldest_first(room, kept):
    builder, codes = build("x{history}", max_tokens=room + 1)
    got = builder.build(UserBatch(num_users=1, history=Ragged.from_lists([[4, 5, 6]])))
    want = [t for item in [4, 5, 6][3 - kept :] for t in sid_tokens(codes[item])]
    mine = [*got.static_prefix.tolist(), *got.tokens.row(0).tolist()]
    assert mine == [ord("x"), *want]
    assert got.truncated.tolist() == [3 * (3 - kept)]
    assert not got.rejections

"""What a checkpoint's tokenizer carries along is not inherited, and no text becomes a token that
says something to the model, whichever way the token came into the tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from engine.prompts.tokenizer import CheckpointTokenizer
from schemas.errors import EngineError
from schemas.semantic_ids import SidSpace

SPACE = SidSpace((3, 2), ("<a_{code}>", "<b_{code}>"))
SIDS = [SPACE.token(level, code) for level, size in enumerate(SPACE.sizes) for code in range(size)]
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<pad>"]
CONTROL = ["<think>", "[INST]", "<｜User｜>"]  # added, and not special
WORDS = ["nightshelf", "   ", "<h1>"]  # added, and text
CORPUS = [
    "hello world, a line of text <a_1><b_0> and <|im_end|> and <pad> more",
    "</s> a b c 1 2 3 _ | < > im end pad a_1 b_1 a_2 <a_1> <a_1> <b_0> <pad> EOS",
] * 20


def byte_level(**model) -> Tokenizer:
    tokens = Tokenizer(models.BPE(**model))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return tokens


def trained(tokens: Tokenizer, size: int = 320) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokens.train_from_iterator(CORPUS, trainer)
    return tokens


def added(tokens: Tokenizer, **flags) -> Tokenizer:
    tokens.add_special_tokens(SPECIAL)
    tokens.add_tokens([AddedToken(text, **{"normalized": False, **flags}) for text in CONTROL])
    tokens.add_tokens([AddedToken(text, **flags) for text in SIDS])
    tokens.add_tokens(WORDS)
    return tokens


def plain_bpe() -> Tokenizer:
    return added(trained(byte_level()))


def stripping_bpe() -> Tokenizer:
    return added(trained(byte_level()), lstrip=True, rstrip=True, normalized=True)


def normalising_bpe() -> Tokenizer:
    tokens = added(trained(byte_level()), normalized=True)
    tokens.normalizer = normalizers.NFKC()
    return tokens


def special_sids_bpe() -> Tokenizer:
    return added(trained(byte_level()), special=True)


def sids_by_merges() -> Tokenizer:
    """The SID tokens are pieces of the vocabulary, made by merges; so is a special token."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    trained(tokens, 400)
    raw = json.loads(tokens.to_str())
    raw["pre_tokenizer"] = None
    vocab, merges = raw["model"]["vocab"], []
    raw["model"]["merges"] = merges
    for text in [*SIDS, "<pad>", "</s>"]:
        for end in range(2, len(text) + 1):
            if text[:end] not in vocab:
                vocab[text[:end]] = len(vocab)
            if [text[: end - 1], text[end - 1]] not in merges:
                merges.append([text[: end - 1], text[end - 1]])
    vocab["<a_1>x"] = len(vocab)  # a longer piece stands on one of them
    merges.append(["<a_1>", "x"])
    raw["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip
    found = Tokenizer.from_str(json.dumps(raw))
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["<pad>", "</s>"])
    return found


def whole_words_bpe() -> Tokenizer:
    """`ignore_merges`: a word that is in the vocabulary is one piece, whatever the merges."""
    raw = json.loads(trained(byte_level()).to_str())
    for text in SIDS:
        raw["model"]["vocab"].setdefault(text, len(raw["model"]["vocab"]))
    raw["model"]["ignore_merges"] = True
    raw["pre_tokenizer"]["use_regex"] = False
    found = Tokenizer.from_str(json.dumps(raw))
    found.add_special_tokens(SPECIAL)
    return found


def word_level() -> Tokenizer:
    words = ["[UNK]", "hello", "world", *SIDS, "[PAD]"]
    tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens.add_special_tokens(["[UNK]", "[PAD]"])
    return tokens


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "[CLS]", "a", "##b", *SIDS, *(chr(c) for c in range(33, 97))]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokens = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokens.normalizer = normalizers.Lowercase()
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens.add_special_tokens(["[UNK]", "[CLS]"])
    return tokens


def unigram() -> Tokenizer:
    """As sentencepiece writes it: BOS, EOS and, here, SID tokens are pieces like all others."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁hello", -3.0)]
    pieces += [(text, -1.0) for text in SIDS]
    pieces += [(chr(c), -5.0) for c in range(33, 127)]
    tokens = Tokenizer(models.Unigram(pieces, 0, False))
    tokens.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokens.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokens


BYTE_LEVEL = [
    plain_bpe, stripping_bpe, special_sids_bpe, sids_by_merges, whole_words_bpe,
]  # fmt: skip
KINDS = [*BYTE_LEVEL, normalising_bpe, word_level, word_piece, unigram]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Each kind of tokenizer: ours over the saved file, and the library's own."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind.__name__)
        tokens = kind()
        tokens.save(str(folder / "tokenizer.json"))
        found[kind] = (CheckpointTokenizer(str(folder), SIDS), tokens)
    return found


def never(tokens: Tokenizer) -> set[int]:
    """Ids that no text may have: SID, special and control tokens, but what stands for a word that
    is not known."""
    ids = {tokens.token_to_id(text) for text in (*SIDS, *SPECIAL, *CONTROL)} - {None}
    ids |= {n for n, token in tokens.get_added_tokens_decoder().items() if token.special}
    return ids - {tokens.token_to_id("[UNK]"), tokens.token_to_id("<unk>")}


fullwidth = str.maketrans({"<": "＜", ">": "＞", "_": "＿", "a": "ａ", "1": "１"})
pieces = st.one_of(
    st.sampled_from([*SIDS, *SPECIAL, *CONTROL, *WORDS, "[PAD]", "[CLS]", "</s>", "<s>", "EOS"]),
    st.sampled_from(SIDS).map(lambda text: text.translate(fullwidth)),
    st.sampled_from(SIDS).map(str.upper),
    st.sampled_from(SIDS).map(lambda text: text[:-1]),
    st.sampled_from(SIDS).map(lambda text: text[1:]),
    st.sampled_from(
        [" ", "  ", "\n", "\t", "\u00a0", "\u200b", "x", "<", ">", "é", "e\u0301", "ﬁ"]
    ),
    st.text(max_size=6),
)
texts = st.lists(pieces, max_size=8).map("".join)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_text_becomes_an_item_or_a_control_token(kind, loaded):
    ours, theirs = loaded[kind]
    forbidden = never(theirs)
    assert {ours.token_id(text) for text in SIDS} <= forbidden
    assert any(forbidden & set(theirs.encode(text).ids) for text in SIDS), (
        "the library matches them"
    )

    @settings(max_examples=50, deadline=None)
    @given(texts)
    @example("".join(SIDS))
    @example("x<a_1>x <a_1> <a_1><b_0>\n<|im_end|>")
    @example("\U0010fffe1\U0010fffe <a_1> \U0010fffe")
    def holds(text):
        (ids,) = ours.encode_texts([text])
        assert not forbidden & set(ids)

    holds()


@pytest.mark.parametrize("kind", BYTE_LEVEL, ids=lambda kind: kind.__name__)
def test_a_text_is_still_that_text(kind, loaded):
    ours, theirs = loaded[kind]

    @settings(max_examples=50, deadline=None)
    @given(texts)
    @example("".join(SIDS))
    def holds(text):
        (ids,) = ours.encode_texts([text])
        assert theirs.decode(ids, skip_special_tokens=False) == text

    holds()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_other_text_has_the_ids_it_always_had(kind, loaded):
    ours, theirs = loaded[kind]
    for text in ("hello world", "a line, of text", "Hello  EOS 1 2", "nightshelf   x <h1>"):
        assert ours.encode_texts([text]) == [theirs.encode(text, add_special_tokens=False).ids]


def test_tokens_of_the_template_stay_tokens(loaded):
    ours, theirs = loaded[plain_bpe]
    for text in (*SIDS, *SPECIAL, *CONTROL):
        assert ours.encode_template(text) == [theirs.token_to_id(text)]


def test_names_of_items_may_be_numbered_tokens_and_no_others(loaded):
    ours, theirs = loaded[plain_bpe]
    assert ours.encode_items(["".join(SIDS)]) == [[theirs.token_to_id(text) for text in SIDS]]
    (ids,) = ours.encode_items(["".join([*SPECIAL, *CONTROL])])
    assert not never(theirs) & set(ids)
    assert theirs.decode(ids, skip_special_tokens=False) == "".join([*SPECIAL, *CONTROL])


def test_semantic_ids_that_look_like_words_are_text_in_a_text(tmp_path):
    tokens = trained(byte_level())
    tokens.add_tokens(["item1", "item2"])
    tokens.save(str(tmp_path / "tokenizer.json"))
    ours = CheckpointTokenizer(str(tmp_path), ["item1"])
    first, second = tokens.token_to_id("item1"), tokens.token_to_id("item2")
    ((*ids,),) = ours.encode_texts(["item1 item2"])
    assert first not in ids and second in ids  # the second is none of this run's
    assert ours.encode_template("item1") == [first]


def test_a_semantic_id_of_one_character_is_refused_beside_texts(tmp_path):
    tokens = trained(byte_level())
    tokens.save(str(tmp_path / "tokenizer.json"))
    ours = CheckpointTokenizer(str(tmp_path), ["7", "8"])
    with pytest.raises(EngineError, match="one character of ordinary text"):
        ours.encode_texts(["anything"])
    assert ours.encode_template("7") == [tokens.token_to_id("7")]


def with_sections(folder: Path, **sections) -> CheckpointTokenizer:
    raw = json.loads(plain_bpe().to_str())
    model = sections.pop("model", {})
    raw.update(sections)
    raw["model"].update(model)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return CheckpointTokenizer(str(folder), SIDS)


PADDING = {
    "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": 8, "pad_id": 3,
    "pad_type_id": 0, "pad_token": "<pad>",
}  # fmt: skip
TRUNCATION = {"direction": "Left", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
WITH_EOS = {
    "type": "TemplateProcessing",
    "single": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "<pad>", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {"<pad>": {"id": "<pad>", "ids": [3], "tokens": ["<pad>"]}},
}  # fmt: skip
TWICE = WITH_EOS | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}


@pytest.mark.parametrize(
    "sections",
    [
        {"padding": PADDING},
        {"padding": PADDING | {"strategy": {"Fixed": 16}, "direction": "Left"}},
        {"truncation": TRUNCATION},
        {"padding": PADDING, "truncation": TRUNCATION},
        {"post_processor": WITH_EOS},
        {"post_processor": TWICE},
        {"model": {"dropout": 0.7}},
        {"model": {"dropout": 1.0}},
        {"decoder": {"type": "Fuse"}},
    ],
    ids=[
        "padding", "fixed padding", "truncation", "both", "post-processor", "twice", "dropout",
        "dropout of all", "decoder",
    ],
)  # fmt: skip
def test_what_a_checkpoint_carries_along_changes_nothing(tmp_path, sections):
    (tmp_path / "plain").mkdir()
    want = with_sections(tmp_path / "plain")
    ours = with_sections(tmp_path, **sections)
    short, long = "hello", "hello world, a line of text and more of it"
    for _ in range(3):  # dropout would differ from call to call
        assert ours.encode_texts([short, long]) == want.encode_texts([short, long])
        assert ours.encode_texts([short]) == ours.encode_texts([short, long])[:1]
        assert ours.encode_template(long) == want.encode_template(long)


def test_sampling_of_a_unigram_is_off(tmp_path):
    tokens = unigram()
    tokens.save(str(tmp_path / "tokenizer.json"))
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["model"] |= {"alpha": 0.1, "nbest_size": -1}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    ours = CheckpointTokenizer(str(tmp_path), SIDS)
    text = "hello world hello"
    got = [tuple(ours.encode_template(text)) for _ in range(20)]
    got += [tuple(ours.encode_texts([text])[0]) for _ in range(20)]
    assert set(got) == {tuple(tokens.encode(text, add_special_tokens=False).ids)}


def test_ids_of_added_words_survive_the_tokens_before_them(tmp_path):
    rng = np.random.default_rng(5)
    for trial in range(20):
        tokens = trained(byte_level())
        names = [*SIDS, *SPECIAL, *CONTROL, *WORDS, "gamma ray", "qua"]
        for name in rng.permutation(names):
            tokens.add_tokens([AddedToken(str(name), special=str(name) in SPECIAL)])
        folder = tmp_path / str(trial)
        folder.mkdir()
        tokens.save(str(folder / "tokenizer.json"))
        ours = CheckpointTokenizer(str(folder), SIDS)
        for name in (*WORDS, "gamma ray", "qua"):
            assert ours.encode_texts([name]) == [[tokens.token_to_id(name)]]
        (ids,) = ours.encode_texts(["".join([*SIDS, *SPECIAL, *CONTROL])])
        assert not never(tokens) & set(ids)

"""The tokenizer of texts that anybody may have written: none of a checkpoint's added tokens that
say something to the model can come out of it.

A checkpoint matches its added tokens inside any text: `<a_1>`, added the usual way, would make an
item out of a line of a user's profile, and `<|im_end|>` would end the turn. Of the added tokens
only words and runs of spaces stay, for the model has read them as text too.

Most added tokens are not in the tokenizer's own vocabulary, and are gone once they are not added.
Those that are in it (sentencepiece keeps `</s>` there, and some keep their semantic IDs) are
renamed to what no text holds, together with the merges that make them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from schemas.errors import EngineError, quoted

_MARK = "\U0010fffe"  # a code point that Unicode keeps out of text
_NO_MARK = "\ufffd"  # what stands for it where a text has it all the same
# `<|im_end|>`, `</s>`, `[INST]`, `<a_1>`, `{{x}}`: written so that no word is taken for it.
_MARKUP = re.compile(
    r"[▁Ġ\s]*(<.*\w.*>|\[.*\w.*\]|\{.*\w.*\}|\|.*\w.*\||[<[]?｜.*\w.*｜[]>]?)[▁Ġ\s]*", re.S
)
_NUMBERED = re.compile(r".*\d\W*", re.S)
# Tags of HTML are added to some tokenizers (Gemma's) as pieces of ordinary text, and never special.
_HTML = re.compile(
    r"</?(h[1-6]|p|b|i|u|a|br|hr|em|strong|strike|sub|sup|span|div|pre|code|blockquote|img|"
    r"ul|ol|li|dl|dt|dd|table|caption|thead|tbody|tfoot|tr|th|td|colgroup|col)>",
    re.I,
)


class UserTokenizer:
    """Ids of users' texts."""

    def __init__(
        self,
        template: FastTokenizer,
        read_json: Callable[[], dict[str, Any]],
        sid_tokens: Collection[str] = (),
        *,
        names_items: bool = False,
    ) -> None:
        """Built from the checkpoint's own tokenizer, whose vocabulary is shared, not copied.

        Args:
            read_json: tokenizer.json, read where tokens of its own vocabulary must be hidden.
            sid_tokens: texts of the semantic-ID tokens of the run, which none of its texts becomes.
            names_items: the texts are the catalog's names of items: numbered tokens, such as
                `<a_12>`, name them and stay tokens; special and control tokens do not.

        Raises:
            EngineError: the tokenizer cannot be rebuilt.
        """
        added = template.get_added_tokens_decoder()
        sids = frozenset(sid_tokens)
        hidden = {
            token.content: number
            for number, token in added.items()
            if token.content in sids or _says_something(token, but_numbered=names_items)
        }
        own = {}  # those of the tokenizer's own vocabulary
        for text in (*sids, *hidden):
            number = template.model.token_to_id(text)
            if number is not None:
                own[text] = number
        raw = read_json() if own else {}
        unknown = _unknown(raw, own)  # stands for an unknown word in users' texts too
        own.pop(unknown or "", None)
        self.refused = tuple(sorted(text for text in own if len(text) == 1))
        self._marked = _within_reach(raw, own)
        self._tokens = _renamed(raw, own) if self._marked else _unadorned(template)
        kept = {number: token for number, token in added.items() if token.content not in hidden}
        self._marked |= _add_again(self._tokens, kept, {n: t.content for n, t in added.items()})
        self._forbidden = np.zeros(1 + max([0, *added, *own.values()]), dtype=np.bool_)
        self._forbidden[[*(n for t, n in hidden.items() if t != unknown), *own.values()]] = True

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text. No BOS, no EOS.

        Raises:
            EngineError: a semantic-ID token is one character, and no text can do without it; or a
                text has become a token that it must not be.
        """
        if self.refused and texts:
            raise EngineError(
                "a semantic-ID token is one character of ordinary text",
                expected="tokens that no text holds, like '<a_12>'",
                got=quoted(list(self.refused)),
                where="sid.tokens",
                do="A prompt with a column of text cannot tell it from an item.",
            )
        if self._marked:
            texts = [text.replace(_MARK, _NO_MARK) if _MARK in text else text for text in texts]
        encoded = self._tokens.encode_batch_fast(texts, add_special_tokens=False)
        ids = [list(one.ids) for one in encoded]
        self._check(ids)
        return ids

    def _check(self, ids: list[list[int]]) -> None:
        """No more than a look-up per token; the tokenizer's own code is not ours to trust."""
        flat = np.asarray([i for one in ids for i in one], dtype=np.int64)
        known = flat[flat < len(self._forbidden)]
        found = known[self._forbidden[known]]
        if len(found):
            raise EngineError(
                "the text of a user became a token that says something to the model",
                got=f"token id {int(found[0])}",
                do="Please report it with the model's tokenizer.json.",
            )


def _unadorned(template: FastTokenizer) -> FastTokenizer:
    """The same vocabulary without added tokens."""
    tokens = FastTokenizer(template.model)
    if template.normalizer is not None:
        tokens.normalizer = template.normalizer
    if template.pre_tokenizer is not None:
        tokens.pre_tokenizer = template.pre_tokenizer
    return tokens


def make_plain(tokens: FastTokenizer) -> None:
    """Undo what tokenizer.json keeps of a call or of a training.

    Padding and truncation are left by the last call before it was saved; the post-processor puts
    BOS and EOS around a text, where ours are pieces of a prompt; dropout and sampling make the
    pieces of a text random. What the model has read texts through stays: normaliser,
    pre-tokenizer, `byte_fallback`, `fuse_unk`, `ignore_merges`, prefixes and suffixes of pieces.
    The decoder is never used.
    """
    tokens.no_padding()
    tokens.no_truncation()
    tokens.post_processor = None
    model = tokens.model
    for name in ("dropout", "alpha", "nbest_size"):  # of BPE; of Unigram, newer releases
        if getattr(model, name, None) is not None:
            setattr(model, name, None)


def _says_something(token: AddedToken, *, but_numbered: bool) -> bool:
    text = token.content
    if len(text) == 1 or not text.strip(" \t\r\n▁Ġ"):
        return False  # a character, such as a line break that ends a text; runs of spaces
    if token.special:
        return True
    if but_numbered and _NUMBERED.fullmatch(text):
        return False
    return _MARKUP.fullmatch(text) is not None and _HTML.fullmatch(text.strip()) is None


def _add_again(tokens: FastTokenizer, kept: dict[int, AddedToken], every: dict[int, str]) -> bool:
    """Add the tokens that stay, with their ids; whether a place of another had to be held."""
    held = False
    missing = [n for n in kept if tokens.model.token_to_id(every[n]) is None]
    last = max(missing, default=-1)
    for number in sorted(every):
        if number in kept:
            tokens.add_tokens([kept[number]])
        elif number < last and tokens.token_to_id(every[number]) is None:
            held = True
            tokens.add_tokens([AddedToken(f"{_MARK}{number}{_MARK}", normalized=False)])
    wrong = [n for n in kept if tokens.token_to_id(every[n]) != n]
    if wrong:
        raise EngineError(
            "the ids of added tokens leave gaps",
            got=f"{quoted(every[wrong[0]])} is {wrong[0]}",
            do="Save the tokenizer again with a current release of transformers.",
        )
    return held


def _unknown(raw: dict[str, Any], own: dict[str, int]) -> str | None:
    """The token of what the vocabulary has not."""
    model = raw.get("model") or {}
    by_place: dict[Any, str] = {number: text for text, number in own.items()}
    found: str | None = model.get("unk_token") or by_place.get(model.get("unk_id"))
    return found


def _within_reach(raw: dict[str, Any], own: dict[str, int]) -> bool:
    """Whether a text may become one of these tokens. In most BPEs by merges alone."""
    model = raw.get("model") or {}
    if not own:
        return False
    if model.get("type", "BPE") != "BPE" or model.get("ignore_merges"):
        return True
    return any(len(text) == 1 for text in own) or any(
        _joined(model, pair) in own for pair in _merges(model)
    )


def _merges(model: dict[str, Any]) -> list[list[str]]:
    return [
        merge.split(" ", 1) if isinstance(merge, str) else merge
        for merge in model.get("merges") or []
    ]


def _joined(model: dict[str, Any], pair: list[str]) -> str:
    """The piece that a merge makes."""
    prefix = model.get("continuing_subword_prefix") or ""
    return pair[0] + pair[1].removeprefix(prefix)


def _renamed(raw: dict[str, Any], own: dict[str, int]) -> FastTokenizer:
    """tokenizer.json without added tokens, and with these tokens of its vocabulary out of reach.

    Characters keep their names: without them a text could not be written.
    """
    name = {text: f"{_MARK}{n}{_MARK}" for text, n in own.items() if len(text) > 1}
    model = dict(raw["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {name.get(text, text): number for text, number in vocab.items()}
    else:  # Unigram: a list of pieces and their scores
        model["vocab"] = [[name.get(text, text), score] for text, score in vocab]
    if "merges" in model:
        model["merges"] = [
            pair
            for pair in _merges(model)
            if _joined(model, pair) not in name and not set(pair) & name.keys()
        ]
    try:
        found = FastTokenizer.from_str(json.dumps({**raw, "model": model, "added_tokens": []}))
    except Exception as err:  # the library raises a bare Exception
        raise EngineError(
            "tokens cannot be taken out of the tokenizer's own vocabulary",
            got=f"{quoted(sorted(own)[:3])}: {err}",
            do="Add them to the tokenizer with add_tokens instead.",
        ) from err
    make_plain(found)
    return found

"""Text to token ids, without transformers: the `tokenizers` library reads the checkpoint's
tokenizer.json.

What the operator wrote (template, separator, suffix, labels) is read with all tokens of the
checkpoint; what stands in a table is text, whatever it looks like (engine/prompts/user_text.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer

from engine.checkpoints.architecture import declared_vocab_size
from engine.prompts.user_text import UserTokenizer, make_plain
from schemas.errors import CatalogError, EngineError, is_panic, quoted
from schemas.semantic_ids import BoundSidSpace, SidSpace
from schemas.settings import RunConfig


class Tokenizer(Protocol):
    """What prompts need from a tokenizer."""

    def encode_template(self, text: str) -> list[int]:
        """Ids of literal template text; special tokens written in it are special."""

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Ids of users' texts; tokens written in them are plain text. No BOS, no EOS."""

    def encode_items(self, texts: list[str]) -> list[list[int]]:
        """Ids of the catalog's names of items: as users' texts, but for numbered tokens such as
        `<a_12>`, which are tokens there. No BOS, no EOS."""

    def token_id(self, text: str) -> int | None:
        """The id of text that is exactly one token, else None."""


class CheckpointTokenizer:
    """The tokenizer.json of a checkpoint folder. `sid_tokens`: texts of the run's SID tokens."""

    def __init__(self, folder: str, sid_tokens: Collection[str] = ()) -> None:
        if not Path(folder).is_dir():
            raise EngineError(
                "the model folder does not exist",
                expected="a Hugging Face checkpoint folder",
                got=quoted(folder),
                where="engine.model",
            )
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise EngineError(
                "the model has no tokenizer",
                expected="a file tokenizer.json in the checkpoint folder",
                where=str(folder),
                do="Save it with AutoTokenizer.from_pretrained(...).save_pretrained(folder).",
            )
        try:
            self._template = FastTokenizer.from_file(str(path))
            make_plain(self._template)
        except BaseException as err:  # a bare Exception for an unreadable file, or a panic
            if not isinstance(err, Exception) and not is_panic(err):
                raise
            raise EngineError(
                "tokenizer.json cannot be read", got=quoted(str(err)), where=str(path)
            ) from err
        self._path = path
        self._users = UserTokenizer(self._template, lambda: _read_json(path), sid_tokens)
        self._items: UserTokenizer | None = None  # made when first asked for

    @property
    def characters_that_are_items(self) -> tuple[str, ...]:
        """SID tokens that no text can do without; `encode_texts` refuses."""
        return self._users.refused

    def encode_template(self, text: str) -> list[int]:
        """Ids of literal template text."""
        return list(self._template.encode(text, add_special_tokens=False).ids)

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Ids of users' texts."""
        return self._users.encode(texts)

    def encode_items(self, texts: list[str]) -> list[list[int]]:
        """Ids of names of items."""
        if self._items is None:
            self._items = UserTokenizer(
                self._template, lambda: _read_json(self._path), names_items=True
            )
        return self._items.encode(texts)

    def token_id(self, text: str) -> int | None:
        """The id of text that is exactly one token."""
        found = self._template.token_to_id(text)
        if found is None or self.encode_template(text) != [found]:
            return None
        return int(found)


class ByteTokenizer:
    """Bytes are ids 0..255 and SID tokens follow; for backends that need no model."""

    def __init__(self, space: SidSpace | None) -> None:
        self._ids: dict[str, int] = {}
        if space is None:
            return
        for level, size in enumerate(space.sizes):
            for code in range(size):
                self._ids[space.token(level, code)] = 256 + len(self._ids)
        if space.end_token is not None:
            self._ids[space.end_token] = 256 + len(self._ids)

    def encode_template(self, text: str) -> list[int]:
        """Ids of literal template text."""
        return list(text.encode())

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Ids of users' texts."""
        return [list(text.encode()) for text in texts]

    def encode_items(self, texts: list[str]) -> list[list[int]]:
        """Ids of names of items."""
        return self.encode_texts(texts)

    def token_id(self, text: str) -> int | None:
        """The id of a SID token, or of a text of one byte."""
        raw = text.encode()
        return raw[0] if len(raw) == 1 else self._ids.get(text)


def load_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of a run: the model's, or bytes where there is no model."""
    space = config.sid.space if config.sid else None
    if config.engine.model is None:
        return ByteTokenizer(space)
    return CheckpointTokenizer(config.engine.model, list(_sid_texts(space)) if space else ())


def _sid_texts(space: SidSpace) -> Iterator[str]:
    for level, size in enumerate(space.sizes):
        yield from (space.token(level, code) for code in range(size))
    if space.end_token is not None:
        yield space.end_token


def _read_json(path: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return raw


def bind_space(config: RunConfig, tokenizer: Tokenizer) -> BoundSidSpace:
    """The run's SID space in token ids, checked against the model's vocabulary.

    Raises:
        CatalogError: a SID token that is not one token, or one the model has no embedding for.
    """
    bound = config.space.bind(tokenizer.token_id)
    if config.engine.model is not None:
        _refuse_adapters(config.engine.model)
        vocab = declared_vocab_size(config.engine.model)
        if vocab is not None and bound.max_token_id >= vocab:
            raise CatalogError(
                "the tokenizer has semantic-ID tokens that the model has no embedding for",
                expected=f"ids below {vocab} (vocab_size in config.json)",
                got=f"id {bound.max_token_id}",
                where=config.engine.model,
                do="Resize the model's embeddings to the tokenizer and save the checkpoint again.",
            )
    return bound


def check_model(config: RunConfig, tokenizer: Tokenizer) -> None:
    """What can be told of the model and the tokenizer without loading the model.

    Raises:
        CatalogError: as `bind_space`.
            A SID token is one character, and texts stand in prompts.
        EngineError: the folder holds an adapter, or no config.json.
    """
    if config.engine.model is not None:
        _refuse_adapters(config.engine.model)
        declared_vocab_size(config.engine.model)
    if config.sid is not None:
        bind_space(config, tokenizer)
    _check_texts(config, tokenizer)


def _check_texts(config: RunConfig, tokenizer: Tokenizer) -> None:
    same = getattr(tokenizer, "characters_that_are_items", ())
    if same and config.prompt.parsed.columns:
        raise CatalogError(
            "a prompt with a column of text cannot tell its characters from items",
            expected="semantic-ID tokens that no text holds, like '<a_12>'",
            got=quoted(list(same)),
            where="sid.tokens",
            do="Leave the text out of prompt.template, or give items tokens of their own.",
        )


def vocab_size(config: RunConfig) -> int | None:
    """Ids the model has, by its config.json; None where there is no model or it does not say."""
    folder = config.engine.model
    return None if folder is None else declared_vocab_size(folder)


def _refuse_adapters(folder: str) -> None:
    """An adapter beside a checkpoint would be left out, or loaded over another base, in silence."""
    if (Path(folder) / "adapter_config.json").exists():
        raise EngineError(
            "the model folder holds an adapter, and adapters are not applied",
            got="adapter_config.json",
            where=folder,
            do="Merge it into the weights first: model.merge_and_unload().save_pretrained(folder).",
        )

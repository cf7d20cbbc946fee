"""The SID space: how many levels a semantic ID has, the codes of each, and the token behind each
code.

A semantic ID names an item to the model as one token per level, `<a_12><b_7><c_201>`. A `SidSpace`
says which text stands for (level, code); `bind` looks those texts up in a tokenizer and gives a
`BoundSidSpace`, in which every code is one token id.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from schemas.errors import CatalogError, ConfigError, quoted

CODE_FIELD = "{code}"


@dataclass(frozen=True)
class SidSpace:
    """Codebook sizes and token patterns, level by level.

    `sizes[l]` is the number of codes of level l; `patterns[l]` holds `{code}` once, e.g.
    `"<a_{code}>"`. `end_token` may close a semantic ID: behind the codes of level l - 1 it is code
    `end_codes[l]` of level l, the one after the codebook's.
    """

    sizes: tuple[int, ...]
    patterns: tuple[str, ...]
    end_token: str | None = None

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.patterns):
            raise ConfigError(
                "sid.sizes and sid.tokens have different lengths",
                expected="one codebook size and one token pattern per level",
                got=f"{len(self.sizes)} sizes and {len(self.patterns)} patterns",
            )
        for level, pattern in enumerate(self.patterns):
            if pattern.count(CODE_FIELD) != 1:
                raise ConfigError(
                    f"sid.tokens[{level}] cannot name codes",
                    expected=f"a pattern with {CODE_FIELD} once, like '<a_{CODE_FIELD}>'",
                    got=quoted(pattern),
                )
        if len(set(self.patterns)) != len(self.patterns):
            raise ConfigError(
                "sid.tokens has the same pattern for two levels",
                expected="a pattern of its own for each level",
                got=quoted(list(self.patterns)),
            )

    @property
    def num_levels(self) -> int:
        """Levels of a full semantic ID."""
        return len(self.sizes)

    @property
    def end_codes(self) -> tuple[int, ...] | None:
        """The code of the end token at each level `[levels + 1]`; None: the space has none."""
        return None if self.end_token is None else (*self.sizes, 0)

    def token(self, level: int, code: int) -> str:
        """The text of a code's token."""
        if self.end_codes is not None and self.end_token and code == self.end_codes[level]:
            return self.end_token
        return self.patterns[level].replace(CODE_FIELD, str(code))

    @cached_property
    def _text_to_code(self) -> dict[str, tuple[int, int]]:
        return {
            self.token(level, code): (level, code)
            for level, size in enumerate(self.sizes)
            for code in range(size)
        }

    @cached_property
    def _splitter(self) -> re.Pattern[str]:
        parts = (re.escape(p).replace(re.escape(CODE_FIELD), r"\d+") for p in self.patterns)
        return re.compile("|".join(parts))

    def parse_token(self, text: str) -> tuple[int, int]:
        """(level, code) of a token's text; `CatalogError` when it is none of ours."""
        try:
            return self._text_to_code[text]
        except KeyError:
            raise CatalogError(
                "a semantic ID holds a token the SID space does not have",
                expected=", ".join(
                    f"{self.token(lv, 0)}…{self.token(lv, size - 1)}"
                    for lv, size in enumerate(self.sizes)
                ),
                got=quoted(text),
            ) from None

    def split(self, text: str) -> list[str]:
        """The tokens of a SID written as one string, `"<a_1><b_2>"`; spaces between are allowed."""
        tokens = self._splitter.findall(text)
        if "".join(tokens) != "".join(text.split()):
            raise CatalogError(
                "a semantic ID's text cannot be split into tokens",
                expected="".join(self.token(lv, 0) for lv in range(self.num_levels)) + " or alike",
                got=quoted(text),
            )
        return tokens

    def bind(self, token_id: Callable[[str], int | None]) -> BoundSidSpace:
        """Look every code's token up.

        Args:
            token_id: text to the id of the single token it is, or None.

        Raises:
            CatalogError: a token the tokenizer does not have as one token.
        """
        levels: list[NDArray[np.int64]] = []
        for level, size in enumerate(self.sizes):
            found = [token_id(self.token(level, code)) for code in range(size)]
            missing = [self.token(level, code) for code, t in enumerate(found) if t is None]
            if missing:
                raise CatalogError(
                    "semantic-ID tokens are not in the tokenizer",
                    expected=f"each of the {size} codes of level {level + 1} to be one token",
                    got=f"{len(missing)} unknown, first {quoted(missing[:3])}",
                    do="Add the tokens to the tokenizer the model was trained with, "
                    "or correct sid.tokens and sid.sizes.",
                )
            levels.append(np.asarray(found, dtype=np.int64))
        flat = np.concatenate(levels)
        if self.end_token is not None:
            end = token_id(self.end_token)
            if end is None:
                raise CatalogError(
                    "sid.end_token is not one token of the tokenizer", got=quoted(self.end_token)
                )
            flat = np.append(flat, end)
            levels = [levels[0], *(np.append(ids, end) for ids in levels[1:]), np.asarray([end])]
        if len(np.unique(flat)) != len(flat):
            raise CatalogError("two semantic-ID codes have the same token id", expected="one each")
        return BoundSidSpace(self, tuple(levels))


@dataclass(frozen=True)
class BoundSidSpace:
    """A SID space whose codes are token ids: `token_ids[l][code]`, int64 `[sizes[l]]`.

    With an end token every level but the first has one id more, and there is one level more.
    """

    space: SidSpace
    token_ids: tuple[NDArray[np.int64], ...]

    @property
    def num_levels(self) -> int:
        """Levels of a full semantic ID."""
        return self.space.num_levels

    @property
    def max_token_id(self) -> int:
        """The largest token id of any code."""
        return max(int(ids.max()) for ids in self.token_ids)

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """Token ids as one table `[levels, max size]`, -1 where a level has no such code."""
        out = np.full((len(self.token_ids), max(map(len, self.token_ids))), -1, dtype=np.int64)
        for level, ids in enumerate(self.token_ids):
            out[level, : len(ids)] = ids
        return out

    def tokens(self, level: NDArray[np.int64], code: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids of codes; elementwise."""
        found: NDArray[np.int64] = self.table[level, code]
        return found


@dataclass(frozen=True)
class TextTokens:
    """Items named by text: a code is a token id of the model, at whatever level."""

    vocab_size: int
    depth: int

    @property
    def max_token_id(self) -> int:
        """The largest id; what a tokenizer has beyond it is refused when texts are read."""
        return self.vocab_size - 1

    @cached_property
    def token_ids(self) -> tuple[NDArray[np.int64], ...]:
        """Every id of the vocabulary, the same array for each level."""
        return (np.arange(self.vocab_size, dtype=np.int64),) * self.depth

    def tokens(self, level: NDArray[np.int64], code: NDArray[np.int64]) -> NDArray[np.int64]:
        """A code is its token."""
        del level
        return code


ItemTokens = BoundSidSpace | TextTokens

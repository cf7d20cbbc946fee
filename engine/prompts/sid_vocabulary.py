"""Which tokens of a checkpoint look like semantic-ID tokens: `<a_0>`, `<s_b_12>`, `<|sid_0_7|>`.

A *family* is the tokens that differ in one number, `<a_{code}>`, with all codes from 0 on. The
levels of a SID space are families that differ in one letter or number, counted up: a, b, c or
0, 1, 2. No torch here.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from engine.prompts.tokenizer import CheckpointTokenizer
from schemas.semantic_ids import CODE_FIELD

_TOKEN = re.compile(r"^(?P<before>.*\D)(?P<code>\d+)(?P<after>\D*)$", re.S)
_MARK = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])|\d+")
_RESERVED = re.compile(r"reserved|unused|extra_id|dummy|placeholder|image|video|audio|fim", re.I)
_OPENING = ("<", "[", "{", "|")  # of tokens that were not added later; words have digits too
_MOST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Family:
    """Tokens of one level: `pattern` with every code below `size`."""

    pattern: str
    size: int


@dataclass(frozen=True)
class Vocabulary:
    """What a checkpoint's tokenizer.json tells about semantic IDs."""

    families: tuple[Family, ...]
    ids: dict[str, int]
    special: tuple[str, ...]  # added tokens that are in no family

    def levels(self, num_levels: int, least: Sequence[int] = ()) -> tuple[Family, ...] | None:
        """The families of `num_levels` levels with room for `least` codes each; None: no such.

        Of several, the one that has no more levels than asked for wins, then the smallest.
        """
        found = []
        for group in self._groups():
            chosen = group[:num_levels]
            fits = all(f.size >= n for f, n in zip(chosen, least, strict=False))
            if len(chosen) == num_levels and fits:
                found.append((len(group) - num_levels, sum(f.size for f in chosen), chosen))
        return min(found, key=lambda f: f[:2])[2] if found else None

    def of_pattern(self, pattern: str) -> Family | None:
        """The family with this pattern."""
        return next((f for f in self.families if f.pattern == pattern), None)

    def token_like(self, *words: str) -> str | None:
        """An added token whose text has all these words, if there is one."""
        named = (t for t in self.special if all(word in t.lower() for word in words))
        return next(named, None)

    @property
    def shown(self) -> str:
        """Added tokens in no family, for a comment."""
        more = len(self.special) - _MOST_SHOWN
        return ", ".join(self.special[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")

    def _groups(self) -> list[tuple[Family, ...]]:
        """Families that are levels of one space, in order; a family may stand in several."""
        by_shape: dict[str, dict[int, Family]] = defaultdict(dict)
        for family in self.families:
            before, _, after = family.pattern.partition(CODE_FIELD)
            for mark in _MARK.finditer(before):
                shape = f"{before[: mark.start()]}\0{before[mark.end() :]}\1{after}"
                by_shape[shape][_number(mark[0])] = family
        groups: list[tuple[Family, ...]] = [(family,) for family in self.families]
        for levels in by_shape.values():
            first = min(levels)
            run = [levels[first]]
            while first + len(run) in levels:
                run.append(levels[first + len(run)])
            groups.append(tuple(run))
        return groups


def _number(mark: str) -> int:
    """A level's mark as a number: `a` is 97, `0` is 0."""
    return int(mark) if mark.isdigit() else ord(mark)


def split_code(token: str) -> tuple[str, int] | None:
    """(pattern, code) of a token's text: the last number in it; None where it has none."""
    match = _TOKEN.match(token)
    if match is None or CODE_FIELD in token or (match["code"] != "0" and match["code"][0] == "0"):
        return None
    return f"{match['before']}{CODE_FIELD}{match['after']}", int(match["code"])


def read_vocabulary(folder: str) -> Vocabulary:
    """Look a checkpoint's tokens over.

    Raises:
        EngineError: there is no tokenizer.json, or it cannot be read.
    """
    CheckpointTokenizer(folder)  # says in words what is wrong with it
    path = Path(folder) / "tokenizer.json"
    ids: dict[str, int] = FastTokenizer.from_file(str(path)).get_vocab()
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    added = [token["content"] for token in raw.get("added_tokens") or []]
    codes: dict[str, set[int]] = defaultdict(set)
    looked_at = set(added) | {text for text in ids if text[:1] in _OPENING}
    for text in looked_at:
        found = split_code(text)
        if found is not None and not _RESERVED.search(text):
            codes[found[0]].add(found[1])
    families = []
    for pattern, numbers in codes.items():
        size = 0
        while size in numbers:
            size += 1
        if size >= 2:
            families.append(Family(pattern, size))
    known = {family.pattern for family in families}
    special = [t for t in added if (found := split_code(t)) is None or found[0] not in known]
    return Vocabulary(tuple(sorted(families, key=lambda f: f.pattern)), ids, tuple(special))


def model_facts(folder: str) -> dict[str, Any]:
    """config.json of a checkpoint, the text model's part of it; empty where it cannot be read."""
    try:
        raw: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {**raw, **(raw.get("text_config") or {})}

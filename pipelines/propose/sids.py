"""How a catalog writes semantic IDs: its levels, its codebooks, and the text of their tokens.

Told from all items of the catalog, and from the model's vocabulary where there is a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.prompts.sid_vocabulary import Vocabulary, split_code
from pipelines.catalog.build import split_texts
from pipelines.catalog.readers import read_file
from pipelines.storage import files
from schemas.column_types import ID, SID, is_list
from schemas.errors import CatalogError, quoted
from schemas.semantic_ids import CODE_FIELD, BoundSidSpace, SidSpace
from schemas.tables import ID_TYPES, Column, TableContract, id_type

_CONTRACT = TableContract("catalog", (Column("item_id", ID), Column("sid", SID)))
_BRACKETED = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
_LETTERS = "abcdefghijklmnop"
_SAMPLE = 1000
_MORE_CODES = 1 << 40  # no code is beyond this: sizes of a space that is only there to read


@dataclass(frozen=True)
class SidGuess:
    """The SID space of a catalog, and why we think so, a sentence per setting."""

    sizes: tuple[int, ...]
    patterns: tuple[str, ...]
    end_token: str | None
    form: str
    why_sizes: str
    why_tokens: str
    shared: bool  # some SID names several items
    item_ids: pa.Array
    columns: tuple[str, ...]


def guess_sids(paths: list[str], vocabulary: Vocabulary | None) -> SidGuess:
    """Look the catalog's files over.

    Raises:
        TableError: a file does not have the layout its name promises.
        CatalogError: the semantic IDs cannot be told.
    """
    how, bind = _space_to_read(paths[0], vocabulary)
    tables = [read_file(path, how, (lambda: bind) if bind else None) for path in paths]
    for table, path in zip(tables, paths, strict=True):
        _CONTRACT.check(table.schema, path)
        if table.schema.field("sid").type != tables[0].schema.field("sid").type:
            raise CatalogError(
                "catalog: files write their semantic IDs in different types",
                expected=f"{tables[0].schema.field('sid').type} as in {paths[0]}",
                got=str(table.schema.field("sid").type),
                where=path,
            )
    sids = pa.chunked_array([c for t in tables for c in t.column("sid").chunks]).combine_chunks()
    ids = [plain_ids(t.column("item_id")) for t in tables]
    lists, form, known = _lists(sids, paths[0])
    used, patterns = _used(lists, known, paths[0])
    space = _guess_space(used, patterns, vocabulary, paths[0])
    _refuse_same(space.patterns, paths[0])
    return SidGuess(
        sizes=tuple(space.sizes),
        patterns=space.patterns,
        end_token=_end_token(lists, vocabulary),
        form=form,
        why_sizes=space.why_sizes,
        why_tokens=space.why_tokens,
        shared=_shared(lists),
        item_ids=pa.concat_arrays(ids),
        columns=tuple(tables[0].column_names),
    )


@dataclass(frozen=True, slots=True)
class _Space:
    """Codes of each level and their tokens, and why these."""

    sizes: list[int]
    patterns: tuple[str, ...]
    why_sizes: str
    why_tokens: str


def _guess_space(
    used: list[int],
    patterns: tuple[str, ...] | None,
    vocabulary: Vocabulary | None,
    path: str,
) -> _Space:
    sizes = [1 << max(0, (n - 1).bit_length()) for n in used]
    why_sizes = f"the catalog uses codes up to {', '.join(str(n - 1) for n in used)}"
    why_sizes += "; rounded up to powers of two"
    why_tokens = "as the catalog writes them"
    if vocabulary is not None:
        families = vocabulary.levels(len(used), used)
        if patterns is not None:
            known = [vocabulary.of_pattern(p) for p in patterns]
            sizes = [max(f.size, n) if f else n for f, n in zip(known, used, strict=True)]
            why_tokens += ", and as the model's tokenizer has them"
        elif families is not None:
            patterns = tuple(family.pattern for family in families)
            sizes = [family.size for family in families]
            why_tokens = "tokens found in the model's tokenizer that come in as many levels"
        else:
            raise CatalogError(
                "the model's tokenizer has no tokens that could be these semantic IDs",
                expected=f"tokens like <a_0>, <b_0>, … or <|sid_0_0|>, <|sid_1_0|>, …: "
                f"{len(used)} levels with at least {', '.join(map(str, used))} codes",
                got=", ".join(f"{f.pattern} x {f.size}" for f in vocabulary.families) or "none",
                where=path,
                do="Use the tokenizer that the model was trained with.",
            )
        why_sizes = f"all that the tokenizer has; the catalog uses {', '.join(map(str, used))}"
    elif patterns is None:
        patterns = tuple(f"<{_LETTERS[level]}_{CODE_FIELD}>" for level in range(len(used)))
        why_tokens = "the usual names; without a model they are only names"
    return _Space(sizes, patterns, why_sizes, why_tokens)


def plain_ids(column: pa.ChunkedArray) -> pa.Array:
    """Ids in the one type they have inside."""
    return column.cast(ID_TYPES[id_type(column.type)]).combine_chunks()


# --- reading --------------------------------------------------------------------------------------


def _space_to_read(
    path: str, vocabulary: Vocabulary | None
) -> tuple[SidSpace, BoundSidSpace | None]:
    """What `read_file` needs to know of layouts that do not say it themselves."""
    if PurePosixPath(path).suffix == ".jsonl":
        return _space_of_tokens(path, vocabulary)
    levels = 1
    if PurePosixPath(path).suffix == ".json":
        first = re.search(rb'"((?:[^"\\]|\\.)*)"', files.read_bytes(path)[:4096])
        levels = first[1].count(b",") + 1 if first else 1
        if levels > 1 and _all_end_with_one(path):
            levels -= 1
    return SidSpace((1,) * levels, tuple(f"<{_LETTERS[i]}_{{code}}>" for i in range(levels))), None


def _all_end_with_one(path: str) -> bool:
    """Whether every key, `"340,6566,5603,1"`, closes with the end token."""
    keys = json.loads(files.read_bytes(path))
    return all(key.rpartition(",")[2].strip() == "1" for key in keys)


def _space_of_tokens(
    path: str, vocabulary: Vocabulary | None
) -> tuple[SidSpace, BoundSidSpace | None]:
    """JSONL holds token ids: they mean something only with the model's tokenizer."""
    if vocabulary is None:
        raise CatalogError(
            "the catalog holds token ids, which only the model's tokenizer can read",
            expected="--model DIR",
            where=path,
        )
    line = files.read_bytes(path).partition(b"\n")[0]
    try:
        tokens = json.loads(line)["token_ids"]
    except (ValueError, KeyError, TypeError) as err:
        raise CatalogError(
            "catalog: the first line has no token_ids", got=quoted(line[:80]), where=path
        ) from err
    texts = {number: text for text, number in vocabulary.ids.items()}
    found = [split_code(texts.get(token, "")) for token in tokens]
    families = [vocabulary.of_pattern(one[0]) if one else None for one in found]
    if not families or any(family is None for family in families):
        raise CatalogError(
            "the catalog's token ids are not semantic-ID tokens of the tokenizer",
            got=quoted([texts.get(token, token) for token in tokens]),
            where=path,
            do="Use the tokenizer that the catalog was made with.",
        )
    kept = [family for family in families if family is not None]
    space = SidSpace(tuple(f.size for f in kept), tuple(f.pattern for f in kept))
    return space, space.bind(vocabulary.ids.get)


def _lists(sids: pa.Array, path: str) -> tuple[pa.Array, str, tuple[str, ...] | None]:
    """Semantic IDs as lists, what form they had, and the patterns that texts were split by."""
    if is_list(sids.type):
        plain = sids.cast(pa.list_(sids.type.value_type))
        return plain, ("codes" if pa.types.is_integer(sids.type.value_type) else "tokens"), None
    texts = sids.cast(pa.string())
    sample = [t for t in texts.slice(0, _SAMPLE).to_pylist() if t]
    tokens = [_BRACKETED.findall(text) or text.split() for text in sample]
    for text, parts in zip(sample, tokens, strict=True):
        if "".join(parts) != "".join(text.split()):
            raise _untold(path, text)
    patterns = _patterns(tokens, path)
    space = SidSpace((_MORE_CODES,) * len(patterns), patterns)
    lists, whole = split_texts(pc.fill_null(texts, ""), space)
    present = texts.is_valid().to_numpy(zero_copy_only=False)
    bad = np.flatnonzero(~whole & present)
    if len(bad):
        raise _untold(path, texts[int(bad[0])].as_py())
    return pc.if_else(pa.array(whole), lists, pa.scalar(None, lists.type)), "texts", patterns


def _untold(path: str, text: str) -> CatalogError:
    return CatalogError(
        "a semantic ID's text cannot be told",
        expected="one token per level with its code as the last number, '<a_1><b_2><c_3>'",
        got=quoted(text),
        where=path,
        do="Take markers such as <|sid_begin|> out of the catalog; they belong into the prompt.",
    )


def _patterns(tokens: Sequence[Sequence[str]], path: str) -> tuple[str, ...]:
    """The pattern of each level, told from the tokens of some semantic IDs."""
    found: list[set[str]] = [set() for _ in range(max((len(one) for one in tokens), default=0))]
    for one in tokens:
        for level, token in enumerate(one):
            found[level].add(_split(token, path)[0])
    return _one_each(found, path)


def _split(token: str | None, path: str) -> tuple[str, int]:
    """(pattern, code) of a token."""
    found = split_code(token or "")
    if found is None:
        raise _untold(path, token or "")
    return found


def _one_each(found: Sequence[set[str]], path: str) -> tuple[str, ...]:
    """The one pattern of each level."""
    for level, patterns in enumerate(found):
        if len(patterns) > 1:
            raise CatalogError(
                f"tokens of level {level + 1} of the semantic IDs are named in several ways",
                expected="one pattern per level, like <a_{code}>",
                got=", ".join(sorted(patterns)[:5]),
                where=path,
            )
    if not found:
        raise CatalogError("the catalog has no semantic IDs", where=path)
    return tuple(next(iter(patterns)) for patterns in found)


def _refuse_same(patterns: tuple[str, ...], path: str) -> None:
    if len(set(patterns)) < len(patterns):
        raise CatalogError(
            "two levels of the semantic IDs have tokens of one pattern",
            expected="a pattern per level, like <a_{code}>, <b_{code}>",
            got=", ".join(patterns),
            where=path,
            do="Write the codes of each level from 0 on as a list of integers, and name the "
            "tokens of each level apart.",
        )


def _used(
    lists: pa.Array, known: tuple[str, ...] | None, path: str
) -> tuple[list[int], tuple[str, ...] | None]:
    """Codes that each level needs, one more than its largest; and the patterns of its tokens."""
    lists = lists.drop_null()
    lengths = pc.list_value_length(lists).to_numpy().astype(np.int64)
    values = lists.flatten()
    level = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if not len(values):
        raise CatalogError("the catalog has no semantic IDs", where=path)
    levels = range(int(lengths.max()))
    patterns = known
    if pa.types.is_integer(values.type):
        codes = pc.fill_null(values, 0).to_numpy().astype(np.int64)
    else:
        encoded = pc.dictionary_encode(values.cast(pa.string()))
        distinct = [_split(token, path) for token in encoded.dictionary.to_pylist()]
        at = encoded.indices.to_numpy()
        codes = np.asarray([code for _, code in distinct], dtype=np.int64)[at]
        if patterns is None:
            heads = [{distinct[i][0] for i in np.unique(at[level == lv])} for lv in levels]
            patterns = _one_each(heads, path)
    return [int(codes[level == lv].max()) + 1 for lv in levels], patterns


def _shared(lists: pa.Array) -> bool:
    """Whether two items have one semantic ID."""
    texts = pc.binary_join(lists.cast(pa.list_(pa.string())), " ")
    return bool(len(pc.unique(texts.drop_null())) < len(texts) - texts.null_count)


def _end_token(lists: pa.Array, vocabulary: Vocabulary | None) -> str | None:
    """A token to end semantic IDs with, where one of them is the beginning of another."""
    lengths = pc.list_value_length(lists.drop_null())
    if pc.min_max(lengths)["min"].as_py() == pc.min_max(lengths)["max"].as_py():
        return None
    texts = pc.unique(pc.binary_join(lists.drop_null().cast(pa.list_(pa.string())), " "))
    ordered = sorted(f"{text} " for text in texts.to_pylist())  # "1 2 " comes before "1 2 3 "
    nested = any(b.startswith(a) for a, b in zip(ordered[:-1], ordered[1:], strict=True))
    if not nested:
        return None
    return (vocabulary.token_like("end") if vocabulary else "<sid_end>") or None

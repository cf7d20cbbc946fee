"""Look a catalog over before anything runs: every problem at once, and how it fits the model.

`read_catalog` stops at the first item it cannot use. The check here counts all of them, with
examples, and says how the SID tokens, the tokenizer and the checkpoint fit together. A catalog
without problems here is one that `read_catalog` takes, and the other way round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from engine.checkpoints.files import VocabularySizes, vocabulary_sizes
from engine.prompts.tokenizer import Tokenizer, bind_space, load_tokenizer
from pipelines.catalog.build import read_codes, split_texts
from pipelines.catalog.columns import join_files
from pipelines.catalog.items import list_items, read_items
from pipelines.catalog.readers import read_file
from schemas.errors import CatalogError, NightshelfError, quoted
from schemas.requests import Ints
from schemas.semantic_ids import BoundSidSpace, SidSpace
from schemas.settings import RunConfig
from schemas.tables import CATALOG, TableContract

Mask = NDArray[np.bool_]
_COLUMNS = [column.name for column in CATALOG.columns]
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that keeps the catalog, or a part of it, from being used."""

    rule: str
    count: int  # items, or tokens where the rule is about tokens
    examples: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True)
class LevelUse:
    """How many of a level's codes the catalog uses."""

    level: int
    used: int
    available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogFacts:
    """What the usable part of a catalog holds. An item that is repeated counts once."""

    rows: int
    items: int
    distinct_sids: int
    shared_sids: int  # SIDs that name more than one item
    items_sharing: int  # items of those SIDs
    largest_group: int  # items of the SID that names the most
    largest_group_sid: str
    largest_group_items: tuple[str, ...]
    sids_by_length: dict[int, int]
    levels: tuple[LevelUse, ...]


@dataclass(frozen=True, slots=True)
class CatalogReport:
    """What `check_catalog` found. Facts are None where there is nothing to tell them from."""

    problems: tuple[Problem, ...]
    catalog: CatalogFacts | None
    vocabulary: VocabularySizes | None


def check_catalog(config: RunConfig) -> CatalogReport:
    """Every problem of a configuration's catalog, SID tokens and vocabulary sizes.

    Items named by text have no semantic IDs to look at: what is told is the first problem that
    keeps them from being read.
    """
    problems: list[Problem] = []
    vocabulary = None
    if config.sid is not None:
        problems, vocabulary = check_vocabulary(config)
    found, facts, _ = check_rows(config)
    return CatalogReport((*problems, *found), facts, vocabulary)


def check_rows(
    config: RunConfig,
) -> tuple[list[Problem], CatalogFacts | None, pa.Array | None]:
    """Every problem of the catalog's files and items, what the good ones hold, and the item ids;
    None where the files cannot be read.
    """
    if config.sid is None:
        try:
            return [], None, read_items(config, list_items(config).files).item_ids
        except NightshelfError as err:
            return [_of_error("unreadable", err)], None, None
    table, problems = _read(config)
    if table is None:
        return problems, None, None
    found, facts = _check_items(table, config.space)
    return problems + found, facts, table.column("item_id").combine_chunks()


# --- SID tokens, tokenizer, checkpoint ------------------------------------------------------------


def check_vocabulary(config: RunConfig) -> tuple[list[Problem], VocabularySizes | None]:
    """How the SID tokens, the tokenizer and the checkpoint fit together."""
    if config.engine.model is None:  # bytes, and SID tokens of our own making
        return _check_tokens(config.space, load_tokenizer(config), None), None
    try:
        tokenizer = load_tokenizer(config)
    except NightshelfError as err:
        return [_of_error("tokenizer", err)], None
    try:
        sizes = vocabulary_sizes(config.engine.model)
    except NightshelfError as err:
        return [
            _of_error("checkpoint", err),
            *_check_tokens(config.space, tokenizer, None),
        ], None
    return [*_check_tokens(config.space, tokenizer, sizes), *_check_sizes(sizes)], sizes


def _check_tokens(
    space: SidSpace, tokenizer: Tokenizer, sizes: VocabularySizes | None
) -> list[Problem]:
    """SID tokens that are not one token, and those whose id the model does not have."""
    texts = [space.token(lv, c) for lv, size in enumerate(space.sizes) for c in range(size)]
    texts += [space.end_token] if space.end_token is not None else []
    ids = [tokenizer.token_id(text) for text in texts]
    missing = [text for text, found in zip(texts, ids, strict=True) if found is None]
    problems = []
    if missing:
        message = f"of {len(texts)} SID tokens, {len(missing)} are not one token of the tokenizer"
        problems.append(_problem("token_not_single", missing, message))
    uses = Counter(i for i in ids if i is not None)
    twice = [text for text, i in zip(texts, ids, strict=True) if i is not None and uses[i] > 1]
    if twice:
        problems.append(
            _problem("token_twice", twice, "two codes, or a code and the end, are one token")
        )
    limit = sizes.smallest if sizes else None
    if limit is not None:
        found = zip(texts, ids, strict=True)
        beyond = [f"{text} (id {i})" for text, i in found if i is not None and i >= limit]
        if beyond:
            message = f"SID tokens have ids that the model does not have; it ends at {limit - 1}"
            problems.append(_problem("token_without_embedding", beyond, message))
    return problems


def _check_sizes(sizes: VocabularySizes) -> list[Problem]:
    """Parts of the checkpoint that disagree. More rows than ids is padding, and right."""
    problems = []
    parts = {"config.json": sizes.config, "embedding": sizes.embedding, "head": sizes.head}
    known = {name: size for name, size in parts.items() if size is not None}
    words = tuple(f"{name} {size}" for name, size in known.items())
    if len(set(known.values())) > 1:
        message = "the model's vocabulary has different sizes in its parts"
        problems.append(Problem("vocabulary_mismatch", len(set(known.values())), words, message))
    if sizes.smallest is not None and sizes.tokenizer > sizes.smallest:
        message = (
            f"the tokenizer has ids up to {sizes.tokenizer - 1}, beyond the model's vocabulary"
        )
        beyond = sizes.tokenizer - sizes.smallest
        problems.append(Problem("tokenizer_larger_than_model", beyond, words, message))
    return problems


# --- files, items and their semantic IDs ----------------------------------------------------------


def _read(config: RunConfig) -> tuple[pa.Table | None, list[Problem]]:
    """All files as one table; None when any of them cannot be read."""
    problems: list[Problem] = []
    tables: list[pa.Table] = []
    try:
        paths = list_items(config).files
    except NightshelfError as err:
        return None, [_of_error("unreadable", err)]
    for path in paths:
        try:
            table = read_file(path, config.space, lambda: _bound(config), _COLUMNS)
        except NightshelfError as err:
            problems.append(_of_error("unreadable", err))
            continue
        found = _check_columns(table, path)
        problems += found
        if not found:
            tables.append(table)
    if problems:
        return None, problems
    try:
        joined = join_files(tables, paths, CATALOG)
    except NightshelfError as err:
        return None, [_of_error("columns", err)]
    if len(joined) == 0:
        return None, [Problem("empty", 1, tuple(paths[:_EXAMPLES]), "the catalog has no rows")]
    return joined, []


def _bound(config: RunConfig) -> BoundSidSpace:
    return bind_space(config, load_tokenizer(config))


def _check_columns(table: pa.Table, path: str) -> list[Problem]:
    problems = []
    for column in CATALOG.columns:
        try:
            TableContract(CATALOG.table, (column,)).check(table.schema, path)
        except NightshelfError as err:
            problems.append(_of_error("columns", err))
    return problems


def _check_items(table: pa.Table, space: SidSpace) -> tuple[list[Problem], CatalogFacts | None]:
    ids = table.column("item_id").combine_chunks()
    problems, usable = _check_ids(ids)
    sid = table.column("sid").combine_chunks()
    found, right = _check_sids(sid, ids, space)
    problems += found
    rows = np.flatnonzero(usable & right)
    if not len(rows):
        return problems, None
    kept = ids.take(pa.array(rows))
    codes = read_codes(sid.take(pa.array(rows)), kept, space)
    grouped = _Grouped(codes)
    return problems + _check_prefixes(grouped, kept, space), _facts(len(ids), kept, grouped, space)


def _check_ids(ids: pa.Array) -> tuple[list[Problem], Mask]:
    """Null and repeated item ids, and the rows that are the first of an id."""
    problems = []
    null = ids.is_null().to_numpy(zero_copy_only=False)
    if null.any():
        rows = [f"row {row}" for row in np.flatnonzero(null)[:_EXAMPLES]]
        problems.append(_problem("null_item_id", rows, "item_id is null", int(null.sum())))
    encoded = pc.dictionary_encode(ids)
    number = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    first = np.zeros(len(ids), dtype=bool)
    first[np.unique(number, return_index=True)[1]] = True
    counts = np.bincount(number[~null], minlength=len(encoded.dictionary))
    repeated = np.flatnonzero(counts > 1)
    if len(repeated):
        shown = [
            f"{quoted(encoded.dictionary[int(i)].as_py())} in {counts[i]} rows"
            for i in repeated[:_EXAMPLES]
        ]
        message = "items stand in more than one row"
        problems.append(_problem("duplicate_item_id", shown, message, len(repeated)))
    return problems, first & ~null


class _Faults:
    """Collects faults of semantic IDs, and which rows have none."""

    def __init__(self, ids: pa.Array) -> None:
        self.problems: list[Problem] = []
        self.right: Mask = np.ones(len(ids), dtype=bool)
        self._ids = ids

    def add(
        self, rule: str, message: str, rows: Ints, what: Callable[[int], str] | None = None
    ) -> None:
        """Rows with this fault, one entry per faulty code; `what(i)` tells of the i-th entry."""
        if not len(rows):
            return
        self.right[rows] = False
        distinct, at = np.unique(rows, return_index=True)
        shown = [
            f"item {quoted(self._ids[int(row)].as_py())}" + (f": {what(int(i))}" if what else "")
            for row, i in zip(distinct[:_EXAMPLES], at[:_EXAMPLES], strict=True)
        ]
        self.problems.append(_problem(rule, shown, message, len(distinct)))


def _check_sids(column: pa.Array, ids: pa.Array, space: SidSpace) -> tuple[list[Problem], Mask]:
    """Everything that can be wrong with one semantic ID by itself, and the rows that are right."""
    faults = _Faults(ids)
    null = column.is_null().to_numpy(zero_copy_only=False)
    faults.add("null_sid", "the semantic ID is null", np.flatnonzero(null))
    if pa.types.is_fixed_size_list(column.type) or pa.types.is_large_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    lists = column
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        texts = pc.fill_null(column, "")
        lists, whole = split_texts(texts, space)
        empty = pc.equal(pc.utf8_trim_whitespace(texts), "").to_numpy(zero_copy_only=False)
        faults.add("empty_sid", "the semantic ID is empty", np.flatnonzero(empty & ~null))
        broken = np.flatnonzero(~whole & ~empty)
        message = "the text is not SID tokens and nothing else"
        faults.add("unreadable_sid", message, broken, lambda i: quoted(texts[broken[i]].as_py()))
        lists = pc.if_else(pa.array(whole), lists, pa.scalar(None, lists.type))
        null = ~whole
    _check_lists(lists, null, space, faults)
    return faults.problems, faults.right


def _check_lists(column: pa.Array, null: Mask, space: SidSpace, faults: _Faults) -> None:
    levels = space.num_levels
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    lengths = lengths.astype(np.int64)
    faults.add("empty_sid", "the semantic ID is empty", np.flatnonzero((lengths == 0) & ~null))
    long = np.flatnonzero(lengths > levels)
    message = f"semantic IDs have more than {levels} levels"
    faults.add("too_many_levels", message, long, lambda i: f"{lengths[long[i]]} levels")
    values = pc.list_flatten(column)
    row = np.repeat(np.arange(len(lengths)), lengths)
    level = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    missing = values.is_null().to_numpy(zero_copy_only=False)
    hole = np.flatnonzero(missing)
    message = "semantic IDs hold a null code"
    faults.add("null_code", message, row[hole], lambda i: f"level {level[hole[i]] + 1}")
    inside = np.flatnonzero(~missing & (level < levels))
    values, row, level = values.take(pa.array(inside)), row[inside], level[inside]
    if pa.types.is_integer(values.type):
        _check_codes(values, row, level, space, faults)
    else:
        _check_token_texts(values, row, level, space, faults)


def _check_codes(
    values: pa.Array, row: Ints, level: Ints, space: SidSpace, faults: _Faults
) -> None:
    codes = values.to_numpy(zero_copy_only=False)
    sizes = np.asarray(space.sizes)[level]
    bad = np.flatnonzero((codes < 0) | (codes >= sizes))

    def what(i: int) -> str:
        at = bad[i]
        return f"code {codes[at]} at level {level[at] + 1}, of 0 to {sizes[at] - 1}"

    faults.add("code_out_of_range", "codes outside their level's codebook", row[bad], what)


def _check_token_texts(
    values: pa.Array, row: Ints, level: Ints, space: SidSpace, faults: _Faults
) -> None:
    encoded = pc.dictionary_encode(values)
    of_level = np.asarray([_level_of(t, space) for t in encoded.dictionary.to_pylist()], np.int64)
    found = of_level[encoded.indices.to_numpy()]
    unknown = np.flatnonzero(found < 0)
    message = "tokens that the SID space does not have"
    faults.add("unknown_token", message, row[unknown], lambda i: quoted(values[unknown[i]].as_py()))
    moved = np.flatnonzero((found >= 0) & (found != level))

    def what(i: int) -> str:
        at = moved[i]
        return f"{values[at].as_py()!r} at level {level[at] + 1}"

    faults.add("token_of_another_level", "tokens of one level stand at another", row[moved], what)


def _level_of(text: str, space: SidSpace) -> int:
    try:
        return space.parse_token(text)[0]
    except CatalogError:
        return -1


class _Grouped:
    """Items by semantic ID: `order` sorts them, group g is `order[start[g] : start[g + 1]]`."""

    def __init__(self, codes: NDArray[np.int32]) -> None:
        self.order = np.lexsort(codes.T[::-1])
        ordered = codes[self.order]
        new = np.ones(len(codes), dtype=bool)
        new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        self.sids = ordered[new]  # [S, L]
        self.start = np.append(np.flatnonzero(new), len(codes))

    def items(self, group: int, ids: pa.Array) -> list[str]:
        """Some items of a group."""
        rows = self.order[self.start[group] : self.start[group + 1]][:_EXAMPLES]
        return [quoted(ids[int(row)].as_py()) for row in sorted(rows)]

    def text(self, group: int, space: SidSpace) -> str:
        """A group's semantic ID as its tokens."""
        return "".join(space.token(lv, int(c)) for lv, c in enumerate(self.sids[group]) if c >= 0)


def _check_prefixes(grouped: _Grouped, ids: pa.Array, space: SidSpace) -> list[Problem]:
    """SIDs that another SID begins with; -1 sorts first, so the longer one is the next."""
    if space.end_token is not None:
        return []  # it closes them
    short, longer = grouped.sids[:-1], grouped.sids[1:]
    bad = np.flatnonzero(((short == longer) | (short < 0)).all(axis=1))
    if not len(bad):
        return []
    shown = [
        f"{grouped.text(g, space)} (item {grouped.items(g, ids)[0]}) begins "
        f"{grouped.text(g + 1, space)} (item {grouped.items(g + 1, ids)[0]})"
        for g in bad[:_EXAMPLES].tolist()
    ]
    message = "semantic IDs are the beginning of another, so generation could not tell them apart"
    return [_problem("prefix_conflict", shown, message, len(bad))]


def _facts(rows: int, ids: pa.Array, grouped: _Grouped, space: SidSpace) -> CatalogFacts:
    sizes = np.diff(grouped.start)
    largest = int(sizes.argmax())
    lengths = np.bincount((grouped.sids >= 0).sum(axis=1))
    return CatalogFacts(
        rows=rows,
        items=len(ids),
        distinct_sids=len(sizes),
        shared_sids=int((sizes > 1).sum()),
        items_sharing=int(sizes[sizes > 1].sum()),
        largest_group=int(sizes[largest]),
        largest_group_sid=grouped.text(largest, space),
        largest_group_items=tuple(grouped.items(largest, ids)),
        sids_by_length={int(n): int(lengths[n]) for n in np.flatnonzero(lengths)},
        levels=tuple(
            LevelUse(level + 1, len(np.unique(column[column >= 0])), space.sizes[level])
            for level, column in enumerate(grouped.sids.T)
        ),
    )


def _problem(rule: str, shown: Sequence[str], message: str, count: int | None = None) -> Problem:
    return Problem(rule, len(shown) if count is None else count, tuple(shown[:_EXAMPLES]), message)


def _of_error(rule: str, error: NightshelfError) -> Problem:
    return Problem(rule, 1, (error.where,) if error.where else (), str(error))

"""The catalog: read, checked, and saved once per run in the form that workers memory-map."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from engine.prompts.tokenizer import Tokenizer
from engine.trees.sid_trie import EndCodes, SidTrie, build_trie
from pipelines.catalog.columns import join_files
from pipelines.catalog.readers import Bind, read_file, read_parquet_file
from pipelines.storage import files
from pipelines.storage.files import Written
from pipelines.storage.hashes import hash_local
from pipelines.storage.seals import is_written, read_seal, write_seal
from pipelines.storage.storage_errors import translated
from schemas.errors import CatalogError, DamagedFileError, TableError, quoted
from schemas.requests import Ints
from schemas.semantic_ids import CODE_FIELD, SidSpace
from schemas.settings import TextSettings
from schemas.tables import (
    TableContract,
    catalog_contract,
    text_catalog_contract,
)

_EXTRA = ("popularity", "title", "text")
_TEXTS = 1 << 16  # texts tokenised at a time


@dataclass(frozen=True)
class Catalog:
    """Items, in the order that breaks ties: the smaller item id first.

    `table` has `item_id`, `catalog_row` (its row in the input) and, where the input has them,
    `popularity`, `title` and `text`.
    """

    table: pa.Table
    trie: SidTrie

    @property
    def item_ids(self) -> pa.Array:
        """Item ids by catalog position."""
        return self.table.column("item_id").combine_chunks()

    @property
    def popularity(self) -> NDArray[np.float64]:
        """Popularity by catalog position; 0 where it is unknown."""
        if "popularity" not in self.table.column_names:
            return np.zeros(len(self.table))
        column = self.table.column("popularity").cast(pa.float64())
        values: NDArray[np.float64] = pc.fill_null(column, 0.0).to_numpy()
        return np.nan_to_num(values)

    def positions(self, item_ids: pa.Array) -> Ints:
        """Catalog position of each id, -1 for ids that are not in the catalog."""
        found = pc.index_in(item_ids, value_set=self.item_ids)
        out: Ints = pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        return out

    def save(self, folder: str) -> None:
        """Write the catalog for `open_catalog`; the seal goes last."""
        local = files.local_path(folder)
        files.remove_folder(folder)  # who maps what was there keeps it
        with translated(folder, done="written", what="the prepared catalog"):
            if local is not None:
                self._save(Path(local))
                written = _written(Path(local))
            else:
                with TemporaryDirectory(prefix="nightshelf-catalog-") as draft:
                    self._save(Path(draft))
                    written = _written(Path(draft))
                    for name in written:
                        data = (Path(draft) / name).read_bytes()
                        files.write_bytes(files.join(folder, name), data)
        write_seal(folder, written)

    def _save(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        with (
            pa.OSFile(str(root / "items.arrow"), "wb") as sink,
            pa.ipc.new_file(sink, self.table.schema) as writer,
        ):
            writer.write_table(self.table)
        self.trie.save(root / "trie")


def open_catalog(folder: str) -> Catalog:
    """Memory-map what `Catalog.save` wrote; from a store, a copy of it on this machine.

    Raises:
        DamagedFileError: it is not what was written.
    """
    local = files.local_path(folder)
    if local is not None:
        _check(folder, Path(local))
        return _map(Path(local))
    with TemporaryDirectory(prefix="nightshelf-catalog-") as copy:
        for name in files.find(folder):
            target = Path(copy) / name
            with translated(copy, done="written", what="a copy of the prepared catalog"):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(files.read_bytes(files.join(folder, name)))
        _check(folder, Path(copy))
        return _map(Path(copy))  # what is mapped stays when its name goes


def _written(root: Path) -> dict[str, Written]:
    found = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(root)): Written(path.stat().st_size, hash_local(str(path)))
        for path in found
    }


def _check(folder: str, root: Path) -> None:
    seal = read_seal(folder) or {}
    if not seal or not all(is_written(str(root / name), one) for name, one in seal.items()):
        raise DamagedFileError(
            "the prepared catalog is damaged",
            where=folder,
            do="Prepare the run again, as the same command does: the catalog is written anew.",
        )


def _map(root: Path) -> Catalog:
    table = pa.ipc.open_file(pa.memory_map(str(root / "items.arrow"))).read_all()
    return Catalog(table, SidTrie.load(root / "trie"))


def is_saved(folder: str) -> bool:
    """Whether a finished catalog is in the folder, every file of it as it was written."""
    seal = read_seal(folder)
    if not seal:
        return False
    return all(is_written(files.join(folder, name), one) for name, one in seal.items())


def read_catalog(
    paths: list[str],
    space: SidSpace,
    bind: Bind | None = None,
    attributes: tuple[str, ...] = (),
    *,
    end_after: Literal["prefix", "every"] = "prefix",
) -> Catalog:
    """Read catalog files of any layout, check every item, and build the trie.

    Args:
        paths: files that `list_catalog` named.
        space: the SID space.
        bind: gives the token id of every code; needed for files that hold token ids.
        attributes: columns to keep besides those of the contract.
        end_after: which SIDs the space's end token closes, where it has one.

    Raises:
        TableError: a file breaks the contract.
        CatalogError: a null or repeated item id, or a semantic ID outside the space.
    """
    contract = catalog_contract(attributes)
    columns = [column.name for column in contract.columns]
    table = _read_items(paths, contract, lambda path: read_file(path, space, bind, columns))
    ids = table.column("item_id").combine_chunks()
    end = None
    if space.end_codes is not None:
        end = EndCodes(space.end_codes, every=end_after == "every")
    with _naming(paths):
        codes = read_codes(table.column("sid").combine_chunks(), ids, space)
        trie = build_trie(codes, lambda row: _item(ids, row), end=end)
    return _catalog(table, trie, attributes)


def read_text_catalog(
    paths: list[str],
    settings: TextSettings,
    tokenizer: Tokenizer,
    vocab_size: int | None,
    attributes: tuple[str, ...] = (),
) -> Catalog:
    """Read a catalog whose items are named by a text; the trie is over the texts' tokens.

    Args:
        paths: Parquet files.
        settings: which column, and how long a text may be.
        tokenizer: of the model.
        vocab_size: ids the model has; None: any.
        attributes: columns to keep besides those of the contract.

    Raises:
        TableError: a file breaks the contract.
        CatalogError: a null or repeated item id; a text that is null, empty, too long, or holds a
        token the model does not have.
    """
    contract = text_catalog_contract(settings.column, attributes)
    columns = [column.name for column in contract.columns]
    table = _read_items(paths, contract, lambda path: read_parquet_file(path, columns))
    ids = table.column("item_id").combine_chunks()
    with _naming(paths):
        texts = table.column(settings.column).combine_chunks()
        codes = _codes_of_texts(texts, ids, settings, tokenizer, vocab_size)
        trie = build_trie(codes, lambda row: _item(ids, row), prefixes=True)
    return _catalog(table, trie, (settings.column, *attributes))


def _codes_of_texts(
    texts: pa.Array, ids: pa.Array, settings: TextSettings, tokenizer: Tokenizer, vocab: int | None
) -> NDArray[np.int32]:
    """Token ids of each text `[N, longest]`, -1 behind shorter ones."""
    missing = np.flatnonzero(texts.is_null().to_numpy(zero_copy_only=False))
    if len(missing):
        raise CatalogError(
            f"catalog: {settings.column} is null, and it names the items",
            got=f"{_item(ids, int(missing[0]))}; {len(missing)} such items",
        )
    parts, lengths = [], []
    for begin in range(0, len(texts), _TEXTS):  # tokens as Python lists are large
        tokens = tokenizer.encode_items(texts[begin : begin + _TEXTS].to_pylist())
        lengths.append(np.asarray([len(one) for one in tokens], dtype=np.int64))
        parts.append(np.asarray([t for one in tokens for t in one], dtype=np.int64))
    length, flat = np.concatenate(lengths), np.concatenate(parts)
    item = np.repeat(np.arange(len(texts)), length)
    faults = (
        (length == 0, "has no token", "at least one token"),
        (length > settings.max_tokens, "is too long", f"at most {settings.max_tokens} tokens"),
        (
            np.bincount(item[flat >= (vocab or 1 << 31)], minlength=len(texts)) > 0,
            "holds a token that the model has no embedding for",
            f"ids below {vocab}",
        ),
    )
    for bad, what, expected in faults:
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise CatalogError(
                f"catalog: the {settings.column} of an item {what}",
                expected=expected,
                got=f"{_item(ids, row)}, {length[row]} tokens; {int(bad.sum())} such items",
                do="Texts are never cut: shorten them, or raise text.max_tokens."
                if "long" in what
                else "",
            )
    out = np.full((len(texts), int(length.max())), -1, dtype=np.int32)
    out[item, np.arange(len(flat)) - np.repeat(np.cumsum(length) - length, length)] = flat
    return out


def _read_items(
    paths: list[str], contract: TableContract, read: Callable[[str], pa.Table]
) -> pa.Table:
    """All files as one table in the order of item ids, `catalog_row` the order they came in."""
    table = join_files([read(path) for path in paths], paths, contract)
    if len(table) == 0:
        raise TableError(
            "catalog: the table is empty", expected="at least one item", where=paths[0]
        )
    ids = table.column("item_id").combine_chunks()
    if ids.null_count:
        row = int(np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False))[0])
        raise CatalogError(
            "catalog: item_id is null", got=f"row {row} of {len(ids)}", where=paths[0]
        )
    table = table.append_column("catalog_row", pa.array(np.arange(len(ids))))
    table = table.take(pc.sort_indices(ids))
    ids = table.column("item_id").combine_chunks()
    if len(ids) > 1:
        same = pc.equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
        if same.any():
            raise CatalogError(
                "catalog: an item stands more than once",
                expected="one row per item_id",
                got=f"item_id {quoted(ids[int(np.flatnonzero(same)[0])].as_py())}; "
                f"{int(same.sum())} repeated rows",
                where=paths[0],
            )
    return table


@contextmanager
def _naming(paths: list[str]) -> Iterator[None]:
    """Name the files in any catalog error raised inside."""
    try:
        yield
    except CatalogError as err:
        more = f" and {len(paths) - 1} more files" if len(paths) > 1 else ""
        err.where = "; ".join(filter(None, [err.where, paths[0] + more]))
        raise


def _catalog(table: pa.Table, trie: SidTrie, attributes: tuple[str, ...]) -> Catalog:
    extra = dict.fromkeys((*_EXTRA, *attributes))
    keep = ["item_id", "catalog_row", *(name for name in extra if name in table.column_names)]
    return Catalog(table.select(keep), trie)


def read_codes(column: pa.Array, ids: pa.Array, space: SidSpace) -> NDArray[np.int32]:
    """Codes `[N, L]` of a SID column in any of its forms, -1 behind shorter SIDs.

    Raises:
        CatalogError: naming the item, the level and the code or token that is out of the space.
    """
    if pa.types.is_fixed_size_list(column.type) or pa.types.is_large_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if not pa.types.is_list(column.type):
        column = _split_texts(column, ids, space)
    _no_nulls(column, ids)
    offsets = column.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(offsets)
    wrong = np.flatnonzero((lengths < 1) | (lengths > space.num_levels))
    if len(wrong):
        raise CatalogError(
            "catalog: a semantic ID has the wrong number of levels",
            expected=f"1 to {space.num_levels} codes",
            got=f"{int(lengths[wrong[0]])} for item {quoted(ids[int(wrong[0])].as_py())}",
        )
    values = column.values[offsets[0] : offsets[-1]]
    level = np.arange(len(values)) - np.repeat(offsets[:-1] - offsets[0], lengths)
    item = np.repeat(np.arange(len(ids)), lengths)
    if pa.types.is_integer(values.type):
        flat = values.cast(pa.int64()).to_numpy()
    else:
        flat = _codes_of_tokens(values, level, item, ids, space)
    sizes = np.asarray(space.sizes)
    bad = np.flatnonzero((flat < 0) | (flat >= sizes[level]))
    if len(bad):
        at = int(bad[0])
        raise CatalogError(
            "catalog: a semantic ID has a code outside its codebook",
            expected=f"0 to {sizes[level[at]] - 1} at level {level[at] + 1}",
            got=f"{int(flat[at])} for item {quoted(ids[int(item[at])].as_py())}; "
            f"{len(bad)} such codes",
        )
    out = np.full((len(ids), space.num_levels), -1, dtype=np.int32)
    out[item, level] = flat
    return out


def _no_nulls(column: pa.Array, ids: pa.Array) -> None:
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if not missing.any() and column.values.null_count:
        inner = np.flatnonzero(column.values.is_null().to_numpy(zero_copy_only=False))[0]
        row = int(np.searchsorted(column.offsets.to_numpy(), inner, side="right")) - 1
        raise CatalogError("catalog: a semantic ID holds a null code", got=_item(ids, row))
    if missing.any():
        raise CatalogError(
            "catalog: an item has no semantic ID", got=_item(ids, int(np.flatnonzero(missing)[0]))
        )


def _item(ids: pa.Array, row: int) -> str:
    return f"item {quoted(ids[row].as_py())}"


def _split_texts(column: pa.Array, ids: pa.Array, space: SidSpace) -> pa.Array:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise CatalogError("catalog: an item has no semantic ID", got=_item(ids, row))
    tokens, whole = split_texts(column, space)
    if whole.all():
        return tokens
    lists: list[list[str]] = []  # one by one, which names the first that cannot be split
    for row, text in enumerate(column.to_pylist()):
        try:
            lists.append(space.split(text))
        except CatalogError as err:
            err.where = _item(ids, row)
            raise
    return pa.array(lists, pa.list_(pa.string()))


def split_texts(column: pa.Array, space: SidSpace) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Tokens of SIDs written as text, as `SidSpace.split` finds them, and which texts are whole:
    tokens, spaces between them, and nothing else.
    """
    codes = (re.escape(p).replace(re.escape(CODE_FIELD), "[0-9]+") for p in space.patterns)
    token = "|".join(codes)
    text = pc.replace_substring_regex(column, pattern=r"\s+", replacement="")
    rest = pc.replace_substring_regex(text, pattern=token, replacement="")
    whole = pc.and_(pc.equal(rest, ""), pc.not_equal(text, "")).to_numpy(zero_copy_only=False)
    marked = pc.replace_substring_regex(text, pattern=f"({token})", replacement=r"\1 ")
    return pc.split_pattern(pc.utf8_rtrim(marked, " "), " "), whole


def _codes_of_tokens(
    values: pa.Array, level: Ints, item: Ints, ids: pa.Array, space: SidSpace
) -> Ints:
    """Each distinct token is parsed once; then all are looked up together."""
    if pa.types.is_dictionary(values.type):  # its dictionary may hold tokens that no item has
        values = values.dictionary_decode()
    encoded = pc.dictionary_encode(values)
    parsed: list[Any] = []
    for text in encoded.dictionary.to_pylist():
        try:
            parsed.append(space.parse_token(text))
        except CatalogError as err:
            first = int(np.flatnonzero(pc.equal(values, text).to_numpy(zero_copy_only=False))[0])
            err.where = _item(ids, int(item[first]))
            raise
    table = np.asarray(parsed, dtype=np.int64).reshape(-1, 2)
    found = table[encoded.indices.to_numpy()]
    wrong = np.flatnonzero(found[:, 0] != level)
    if len(wrong):
        at = int(wrong[0])
        raise CatalogError(
            "catalog: a semantic ID has a token of another level",
            expected=f"a token like {space.token(int(level[at]), 0)} at level {int(level[at]) + 1}",
            got=quoted(values[at].as_py()),
            where=_item(ids, int(item[at])),
        )
    codes: Ints = found[:, 1]
    return codes

"""Readers of catalog files: each layout in use becomes the one table of the catalog contract,
`item_id`, `sid` and, where the file has them, `title`, `popularity`, `text`.

| file | layout |
|---|---|
| `.parquet` | ours; `pid` stands for `item_id` when that is absent (OpenOneRec `pid2sid`) |
| `.json` | item to tokens (LC-Rec, LETTER, MiniOneRec, MIMIGenRec), or SID keys (FlashRec) |
| `.txt` | SID, title, item id between tabs (MiniOneRec) |
| `.jsonl` | `item_id`, `token_ids`, `metadata` (NVIDIA) |
| `.npy`, `.safetensors` | codes `[N, L]`, or `[H, N]` (GRID, NVIDIA sid_gr); the row is the id |

Readers only read. What a semantic ID may be is checked in one place, `pipelines.catalog.build`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from engine.checkpoints.files import safetensors_header
from pipelines.sources import input_files
from pipelines.sources.input_columns import Piece, raw_batches
from pipelines.sources.listing import list_path
from pipelines.storage import files
from pipelines.storage.storage_errors import translated
from schemas.column_types import ENCRYPTED
from schemas.errors import CatalogError, StorageError, TableError, quoted
from schemas.runs import InputFile
from schemas.semantic_ids import BoundSidSpace, SidSpace

Bind = Callable[[], BoundSidSpace]
_MAX_LEVELS = 16
_PICKLED = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt")
_DTYPES = {"I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
           "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}  # fmt: skip
_INDEX_NAME = re.compile(r"(.+?)\.index[^/]*\.json$")


def list_catalog(path: str, parquet: Callable[[], list[str]] | None = None) -> list[str]:
    """The catalog files a path names: a file or a glob of any layout, or a folder of Parquet files,
    which are known by their content. `parquet` says how these are listed, where not by the path.

    Raises:
        TableError: nothing is there, the layout is not known, or it is pickled.
    """
    suffix = _suffix(path)
    if suffix in _PICKLED:
        raise TableError(
            "catalog: pickled files are not read, since opening one runs the code inside it",
            expected="codes in .safetensors or .npy",
            got=f"a {suffix} file",
            where=path,
            do="Save the tensor with safetensors.torch.save_file or numpy.save.",
        )
    if suffix not in _READERS or suffix == ".parquet":
        return _list_parquet(path, parquet)
    listing = list_path(path, "catalog", suffix)
    if listing.table is not None:
        raise TableError(
            f"catalog: the path leads into a {listing.table.kind} table",
            expected=f"a {suffix} file",
            where=path,
        )
    found = [file.path for file in listing.files]
    found = [one for one in found if not one.endswith(".item.json")]
    if not found:
        raise TableError("catalog: nothing is at the path", expected=f"a {suffix} file", where=path)
    for one in found:
        if _suffix(one) != suffix:
            raise _another_layout(one, f"files ending in {suffix}, as the path does")
    return found


def _list_parquet(path: str, parquet: Callable[[], list[str]] | None) -> list[str]:
    """Parquet files, whatever their names; none of another layout among them."""
    found = parquet() if parquet else input_files.list_parquet(path, "catalog")
    for one in found:
        if layout_of(one) != ".parquet":
            raise _another_layout(one, "Parquet files")
        if len(found) == 1 and _suffix(one) != ".parquet" and not input_files.is_parquet(one):
            raise TableError(
                "catalog: the file's layout is not known",
                expected=f"a name ending in {', '.join(_READERS)}",
                got=quoted(PurePosixPath(one).name),
                where=path,
            )
    return found


def _another_layout(path: str, expected: str) -> TableError:
    return TableError(
        "catalog: a file of another layout is among the catalog's files",
        expected=expected,
        got=quoted(PurePosixPath(path).name),
        where=path,
        do="Take it out of the folder, or name the files that are meant by a glob.",
    )


def describe_catalog(path: str, space: SidSpace, bind: Bind) -> tuple[InputFile, pa.Schema]:
    """Size, rows, version and Arrow schema of one catalog file, as the contract names its columns.

    Raises:
        TableError: the file does not have the layout its name promises.
    """
    if layout_of(path) == ".parquet":
        described, schema = input_files.describe_file(path, "catalog")
        return described, pa.schema([schema.field(i).with_name(n) for i, n in _names(schema)])
    table = read_file(path, space, bind)
    size = _size(path)
    version = catalog_version(path)
    return InputFile(path=path, bytes=size, rows=len(table), version=version), table.schema


def catalog_version(path: str) -> str:
    """The version of a catalog file now, with that of the titles beside it.

    Raises:
        MissingFileError: it is gone.
    """
    companion = _companion(path)
    versions = [input_files.file_version(one) for one in (path, companion) if one is not None]
    return "+".join(versions)


@files.retried
def _size(path: str) -> int:
    fs, inside = files.filesystem(path)
    with translated(path):
        return int(fs.info(inside)["size"])


def read_file(
    path: str,
    space: SidSpace,
    bind: Bind | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """One catalog file as a table, its semantic IDs unchecked.

    Args:
        path: a file that `list_catalog` named.
        space: the levels a semantic ID has.
        bind: gives the token id of every code; needed for files that hold token ids.
        columns: of a Parquet file, the only ones to look at; None: all.

    Raises:
        TableError: the file does not have the layout its name promises.
        StorageError: the file is missing or damaged.
    """
    try:
        layout = layout_of(path)
        if layout == ".parquet":
            return read_parquet_file(path, columns)
        return _READERS[layout](path, space, bind)
    except (OSError, StorageError) as err:
        if files.is_damage(err):
            raise input_files.unreadable("catalog", path, err.__cause__ or err) from err
        if isinstance(err, StorageError):
            raise
        raise StorageError("a file cannot be read", got=_line(err), where=path) from err
    except (ValueError, pa.ArrowException) as err:  # ArrowInvalid, JSON and Unicode errors
        raise TableError(
            "catalog: the file cannot be read as its name promises", got=_line(err), where=path
        ) from err


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()


def layout_of(path: str) -> str:
    """The suffix that stands for a file's layout: a name that says nothing is one of Parquet."""
    suffix = _suffix(path)
    return suffix if suffix in _READERS else ".parquet"


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _names(schema: pa.Schema) -> list[tuple[int, str]]:
    renamed = {} if "item_id" in schema.names else {"pid": "item_id"}
    return [(i, renamed.get(name, name)) for i, name in enumerate(schema.names)]


def read_parquet_file(path: str, columns: Sequence[str] | None) -> pa.Table:
    """Columns of a Parquet file of items, by the names that the contract gives them.

    Raises:
        TableError: the file cannot be read, or not without a key.
    """
    _, schema = input_files.describe_file(path, "catalog")
    named = {name: schema.field(place) for place, name in reversed(_names(schema))}
    if columns is None:
        columns = [name for name in named if schema.names.count(name) < 2]
    named = {name: field for name, field in named.items() if name in columns}
    fields = pa.schema(list(named.values()))
    for name in named:
        if len(schema.get_all_field_indices(named[name].name)) > 1:
            raise TableError(
                f"catalog: column {name!r} stands more than once", where=path, field=name
            )
        if ENCRYPTED in (named[name].metadata or {}):
            raise input_files.encrypted("catalog", path, name)
    try:
        found = list(raw_batches(Piece(path, 0), [field.name for field in fields]))
    except (OSError, pa.ArrowException) as err:
        if not files.is_damage(err):
            raise
        raise input_files.unreadable("catalog", path, err) from err
    table = pa.Table.from_batches(found, None if found else fields).select(fields.names)
    return table.rename_columns(list(named))


def _read_parquet(path: str, _space: SidSpace, _bind: Bind | None) -> pa.Table:
    return read_parquet_file(path, None)


class _Pairs(list[tuple[str, Any]]):
    """A JSON object that keeps repeated keys, which a dict would drop without a word."""


def _read_json(path: str, space: SidSpace, _bind: Bind | None) -> pa.Table:
    pairs = json.loads(files.read_bytes(path), object_pairs_hook=_Pairs)
    if not isinstance(pairs, _Pairs) or not pairs:
        raise _unknown_json(path, "an empty object" if pairs == [] else type(pairs).__name__)
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    counted = [isinstance(value, int) and not isinstance(value, bool) for value in values]
    if all(counted):  # a key may look like anything: an item is called "0,0,5" too
        return _sid_vocabulary(path, keys, space)
    if not _names_tokens(values[0]):
        raise _unknown_json(path, quoted({keys[0]: values[0]}))
    for key, value in pairs:
        if not _names_tokens(value):
            raise ValueError(f"{quoted({key: value})} among items with tokens")
    return _token_index(path, keys, values)


def _names_tokens(value: Any) -> bool:
    """Whether a value may be a semantic ID: a text, or a list of tokens or codes."""
    if isinstance(value, list) and not isinstance(value, _Pairs):
        return all(isinstance(one, str | int) for one in value)
    return isinstance(value, str)


def _unknown_json(path: str, got: str) -> TableError:
    return TableError(
        "catalog: the JSON has no layout we know",
        expected='{"0": ["<a_1>", "<b_2>"], …} by item, or {"1,2,3": 1, …} by semantic ID',
        got=got,
        where=path,
    )


def _token_index(path: str, keys: list[str], sids: list[Any]) -> pa.Table:
    """`{"0": ["<a_236>", "<b_231>", "<c_226>"]}`: item to tokens; titles from `.item.json`."""
    table = {"item_id": pa.array(keys, pa.string()), "sid": pa.array(sids)}
    companion = _companion(path)
    if companion is not None:
        items = json.loads(files.read_bytes(companion))
        if not isinstance(items, dict):
            raise TableError("catalog: titles are not an object by item", where=companion)
        table["title"] = _titles([items.get(key) for key in keys])
    return pa.table(table)


def _companion(path: str) -> str | None:
    """`<name>.item.json` beside `<name>.index….json`, when it is there."""
    match = _INDEX_NAME.fullmatch(path)
    name = f"{match[1]}.item.json" if match else None
    return name if name is not None and files.exists(name) else None


def _titles(entries: list[Any]) -> pa.Array:
    """The `title` of each entry that has one."""
    found = [entry.get("title") if isinstance(entry, dict) else None for entry in entries]
    return pa.array([t if isinstance(t, str) else None for t in found], pa.string())


def _sid_vocabulary(path: str, keys: list[str], space: SidSpace) -> pa.Table:
    """`{"340,6566,5603": 1}`, or with `,1` behind every key for the end token: no item ids."""
    ids = pa.array(keys, pa.string())
    parts = pc.split_pattern(ids, ",")
    codes = pc.utf8_trim_whitespace(parts.values).cast(pa.int64())
    sid = pa.ListArray.from_arrays(parts.offsets, codes)
    one_more = pc.all(pc.equal(pc.list_value_length(sid), space.num_levels + 1)).as_py()
    if one_more and pc.all(pc.equal(pc.list_element(sid, space.num_levels), 1)).as_py():
        sid = pc.list_slice(sid, 0, space.num_levels)
    return pa.table({"item_id": ids, "sid": sid})


def _read_info(path: str, _space: SidSpace, _bind: Bind | None) -> pa.Table:
    """`<a_1><b_2><c_3>`, title and item id between tabs, one item per line, no header."""
    names = ["sid", "title", "item_id"]
    return pa.csv.read_csv(
        io.BytesIO(files.read_bytes(path)),
        pa.csv.ReadOptions(column_names=names),
        pa.csv.ParseOptions(delimiter="\t", quote_char=False),
        pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    )


def _read_jsonl(path: str, _space: SidSpace, bind: Bind | None) -> pa.Table:
    """`{"item_id": …, "token_ids": […], "metadata": {…}}` per line; the title from metadata."""
    if bind is None:
        raise CatalogError(
            "catalog: token ids cannot be read without the tokenizer",
            expected="the run's SID space with its token ids",
            where=path,
        )
    ids: list[Any] = []
    tokens, metadata = [], []
    for number, line in enumerate(files.read_bytes(path).split(b"\n"), 1):
        if line.strip():
            row = _json_line(path, number, line)
            if ids and type(row["item_id"]) is not type(ids[0]):
                raise TableError(
                    "catalog: item_id changes its type between lines",
                    expected=f"{type(ids[0]).__name__}, as {quoted(ids[0])} before",
                    got=f"{type(row['item_id']).__name__} {quoted(row['item_id'])}",
                    where=f"{path}, line {number}",
                    field="item_id",
                )
            ids.append(row["item_id"])
            tokens.append(row["token_ids"])
            metadata.append(row.get("metadata") or None)
    table = {"item_id": pa.array(ids), "sid": _texts_of_tokens(pa.array(tokens), bind())}
    titles = _titles(metadata)
    if titles.null_count < len(titles):
        table["title"] = titles
    return pa.table(table)


def _json_line(path: str, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as err:
        raise TableError(
            "catalog: a line is not JSON", got=_line(err), where=f"{path}, line {number}"
        ) from err
    whole = isinstance(row, dict) and type(row.get("item_id")) in (str, int)
    tokens = row.get("token_ids") if whole else None
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise TableError(
            "catalog: a line has no item_id and token_ids",
            expected='{"item_id": a text or a whole number, "token_ids": [whole numbers]}',
            got=quoted(row),
            where=f"{path}, line {number}",
        )
    found: dict[str, Any] = row
    return found


def _texts_of_tokens(column: pa.Array, bound: BoundSidSpace) -> pa.Array:
    """Token ids as token texts, so that a wrong one is found and named as any other."""
    if not pa.types.is_list(column.type) or not pa.types.is_integer(column.type.value_type):
        raise ValueError(f"token_ids are {column.type}, not lists of integers")
    text = {
        int(token): bound.space.token(level, code)
        for level, ids in enumerate(bound.token_ids)
        for code, token in enumerate(ids)
    }
    encoded = pc.dictionary_encode(column.values)
    known = [text.get(t, f"token id {t}") for t in encoded.dictionary.to_pylist()]
    texts = pa.array(known, pa.string()).take(encoded.indices)
    return pa.ListArray.from_arrays(column.offsets, texts, mask=column.is_null())


def _read_npy(path: str, _space: SidSpace, _bind: Bind | None) -> pa.Table:
    codes = np.load(io.BytesIO(files.read_bytes(path)), allow_pickle=False)
    return _table_of_codes(np.asarray(codes), path)


def _read_safetensors(path: str, _space: SidSpace, _bind: Bind | None) -> pa.Table:
    """The one integer matrix of the file."""
    data = files.read_bytes(path)
    header, start = safetensors_header(io.BytesIO(data))
    found = [t for t in header.values() if t["dtype"] in _DTYPES and len(t["shape"]) == 2]
    if len(found) != 1:
        held = {name: f"{t['dtype']} {t['shape']}" for name, t in header.items()}
        raise TableError(
            "catalog: the file does not name the codes",
            expected="exactly one integer tensor [N, L]",
            got=quoted(held),
            where=path,
        )
    begin, end = (start + offset for offset in found[0]["data_offsets"])
    flat = np.frombuffer(data[begin:end], dtype=_DTYPES[found[0]["dtype"]])
    return _table_of_codes(flat.reshape(found[0]["shape"]), path)


def _table_of_codes(codes: NDArray[Any], path: str) -> pa.Table:
    """Codes `[N, L]`, or `[H, N]`, whichever leaves at most 16 levels; -1 fills shorter SIDs."""
    few = [size <= _MAX_LEVELS for size in codes.shape]
    if codes.ndim != 2 or codes.dtype.kind not in "iu" or sum(few) != 1:
        raise TableError(
            "catalog: the array cannot be read as codes",
            expected=f"integers [N, L] or [H, N], at most {_MAX_LEVELS} levels and more items, "
            "so that the two are told apart",
            got=f"{codes.dtype} {list(codes.shape)}",
            where=path,
            do="Write other catalogs as Parquet: item_id, sid list<int>.",
        )
    rows = np.ascontiguousarray(codes.T if few[0] else codes).astype(np.int64)
    live = rows != -1
    lengths = np.where(live.any(axis=1), live.shape[1] - live[:, ::-1].argmax(axis=1), 0)
    inside = np.arange(rows.shape[1]) < lengths[:, None]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    sid = pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows[inside]))
    return pa.table({"item_id": np.arange(len(rows)), "sid": sid})


_READERS: dict[str, Callable[[str, SidSpace, Bind | None], pa.Table]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".txt": _read_info,
    ".jsonl": _read_jsonl,
    ".npy": _read_npy,
    ".safetensors": _read_safetensors,
}

"""Columns of a Parquet file by their place, and which of them nobody can read without a key."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from schemas.column_types import ENCRYPTED, is_list

_FOOTER = 8  # length of the footer, then a magic word


def places(schema: pa.Schema) -> list[range]:
    """Places of the Parquet columns behind each top-level column. Names say nothing, since a name
    may hold dots, or stand twice.
    """
    out, at = [], 0
    for field in schema:
        size = _width(field.type)
        out.append(range(at, at + size))
        at += size
    return out


def leaves(schema: pa.Schema, sources: Sequence[str]) -> list[int]:
    """Places of the Parquet columns behind some top-level columns."""
    wanted = set(sources)
    found = zip(schema, places(schema), strict=True)
    return [at for field, span in found if field.name in wanted for at in span]


def _width(dtype: pa.DataType) -> int:
    """Parquet columns that a type takes."""
    if isinstance(dtype, pa.BaseExtensionType):
        return _width(dtype.storage_type)
    if pt.is_map(dtype):
        return _width(dtype.key_type) + _width(dtype.item_type)
    if is_list(dtype):
        return _width(dtype.value_type)
    if pt.is_struct(dtype):
        return sum(_width(field.type) for field in dtype)
    return 1


def says_encrypted(error: BaseException) -> bool:
    """Whether Arrow failed for want of a key."""
    text = str(error).lower()
    return "decrypt" in text or "encrypted" in text


def mark_encrypted(handle: Any, parquet: pq.ParquetFile, schema: pa.Schema) -> pa.Schema:
    """The schema of an open file, its encrypted columns marked.

    Metadata of an encrypted column must not be asked for: Arrow ends the process. So a row of each
    column is read, of files that have such columns at all.
    """
    if not parquet.metadata.num_row_groups or not _is_signed(handle, parquet.metadata):
        return schema
    fields = []
    for field, span in zip(schema, places(schema), strict=True):
        try:
            rows = parquet.reader.iter_batches(1, [0], list(span), use_threads=False)
            next(iter(rows), None)
        except (OSError, pa.ArrowException) as err:
            if says_encrypted(err):
                field = field.with_metadata({**(field.metadata or {}), ENCRYPTED: b"1"})
        fields.append(field)
    return pa.schema(fields, schema.metadata)


def _is_signed(handle: Any, footer: pq.FileMetaData) -> bool:
    """Whether the footer is signed, as that of a file with encrypted columns is: the signature
    stands between the metadata and the length of both.
    """
    handle.seek(-_FOOTER, 2)
    (length,) = struct.unpack("<I", handle.read(4))
    return bool(length != footer.serialized_size)

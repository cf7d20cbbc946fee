"""Propose a configuration for the user's own tables, so that the first run needs no editing."""

from __future__ import annotations

import datetime as dt
import os
import re
from pathlib import Path

import pyarrow as pa

from engine.prompts.projector_spec import read_projector_spec
from engine.prompts.sid_vocabulary import model_facts, read_vocabulary
from engine.prompts.tokenizer import ByteTokenizer, CheckpointTokenizer, Tokenizer
from pipelines.catalog.readers import list_catalog
from pipelines.propose.config import Found, config_text
from pipelines.propose.dates import Sources, date_of, latest_day
from pipelines.propose.sids import SidGuess, guess_sids, plain_ids
from pipelines.propose.tables import (
    check_exclusions,
    guess_candidates,
    guess_text_column,
    guess_users,
)
from pipelines.sources import input_files
from pipelines.sources.listing import list_path
from pipelines.storage import files
from schemas.column_types import ID
from schemas.errors import ConfigError, TableError
from schemas.tables import CATALOG, Column, TableContract, id_type

__all__ = ["Sources", "propose_config"]

_URL = re.compile(r"^[a-z][a-z0-9+.-]*://")


def propose_config(sources: Sources, folder: str) -> str:
    """The text of a configuration file that will lie in `folder`.

    Raises:
        InputError: a table cannot be used, or its semantic IDs cannot be told.
        EngineError: the model's or the projector's folder cannot be read.
    """
    sources, days = latest_day(sources)
    vocabulary = read_vocabulary(sources.model) if sources.model else None
    paths = list_catalog(sources.catalog)
    text_column = guess_text_column(paths[0])
    sids: SidGuess | None = None
    if text_column is None:
        sids = guess_sids(paths, vocabulary)
        ids, columns = sids.item_ids, sids.columns
    else:
        if sources.candidates is None:
            raise ConfigError(
                "a catalog without semantic IDs cannot be searched, only scored",
                expected="--candidates PATH, or a column sid in the catalog",
                got=f"a catalog with the column {text_column!r}",
                where=sources.catalog,
            )
        ids, columns = _items_of_texts(paths)
    item_type = id_type(ids.type)
    users = guess_users(sources.users, item_type)
    shape = None
    if sources.candidates is not None:
        shape = guess_candidates(sources.candidates, users, item_type)
    if sources.exclusions is not None:
        check_exclusions(sources.exclusions, users, item_type)
    ds = date_of(sources)
    known = {column.name for column in CATALOG.columns} | {"pid"}
    return config_text(
        Found(
            surface=sources.surface,
            ds=ds or dt.date.today().isoformat(),
            users_path=_table(sources.users, folder, ds),
            catalog_path=_table(sources.catalog, folder, ds),
            candidates_path=_table(sources.candidates, folder, ds) if sources.candidates else None,
            exclusions_path=_table(sources.exclusions, folder, ds) if sources.exclusions else None,
            model_path=_path(sources.model, folder, None) if sources.model else None,
            projector_path=_path(sources.projector, folder, None) if sources.projector else None,
            users=users,
            sids=sids,
            text_column=text_column,
            num_items=len(ids.unique()),
            has_popularity="popularity" in columns,
            shape=shape,
            vocabulary=vocabulary,
            model=model_facts(sources.model) if sources.model else {},
            projector=read_projector_spec(sources.projector) if sources.projector else None,
            text_tokens=_text_tokens(sources.model, paths, text_column) if text_column else 0,
            attributes=tuple(name for name in columns if name not in known),
            days=days,
        )
    )


def _items_of_texts(paths: list[str]) -> tuple[pa.Array, tuple[str, ...]]:
    """Item ids of a catalog without semantic IDs, and its columns."""
    columns: tuple[str, ...] = ()
    parts = []
    for path in paths:
        _, schema = input_files.describe_file(path, "catalog")
        TableContract("catalog", (Column("item_id", ID),)).check(schema, path)
        columns = columns or tuple(schema.names)
        parts.append(plain_ids(files.read_parquet(path, ["item_id"]).column("item_id")))
    return pa.concat_arrays(parts), columns


def _text_tokens(model: str | None, paths: list[str], column: str) -> int:
    """Tokens of the longest item text."""
    tokenizer: Tokenizer = ByteTokenizer(None)
    if model is not None:
        tokenizer = CheckpointTokenizer(model)
    longest = 0
    for path in paths:
        texts = files.read_parquet(path, [column]).column(column).drop_null().to_pylist()
        longest = max([longest, *map(len, tokenizer.encode_texts(texts))])
    if longest == 0:
        raise TableError(f"catalog: column {column!r} has no text", where=paths[0])
    return longest


def _path(path: str, folder: str, ds: str | None) -> str:
    """A path as the file names it: relative to the file where it lies below, with {ds} in it."""
    if not _URL.match(path):
        full, base = Path(os.path.abspath(path)), Path(os.path.abspath(folder))
        path = str(full.relative_to(base)) if full.is_relative_to(base) else str(full)
    return path if ds is None else path.replace(ds, "{ds}")


def _table(path: str, folder: str, ds: str | None) -> str | dict[str, str]:
    """A table's path as the file names it; one with a log by its kind."""
    named = _path(path, folder, ds)
    suffix = Path(path).suffix
    found = None if suffix in (".json", ".jsonl", ".txt", ".npy") else list_path(path, "input")
    if found is None or found.table is None or found.below:
        return named
    return {found.table.kind.lower(): named}

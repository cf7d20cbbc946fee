"""Data files of lake tables. A name says whose rows are in the file, how many files belong to it,
and the hash of its content: a partition can be told whole, and a file undamaged, by the table's
list of live files and nothing else.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.publish.rows import Rows, encoded
from pipelines.storage import files
from schemas.errors import StorageError, quoted

Encoding = Callable[[pa.Table], pa.Table]
_NAME = re.compile(
    r"^part-(?P<index>\d{5,})-(?P<total>\d{5,})-(?P<token>[0-9a-f]{12})"
    r"-(?P<xxh3>[0-9a-f]{32})-(?P<run>.+)\.parquet$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """What the name of a data file says."""

    run_id: str
    token: str  # of one publish
    index: int
    total: int  # files of that publish
    xxh3: str  # of the content


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFile:
    """A data file of a partition, as the table's log or manifests list it."""

    path: str  # as the table writes it
    rows: int
    bytes: int
    deletes: bool = False  # whether rows of it are deleted by another file


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """Content that is to become a data file."""

    name: str
    data: bytes
    rows: int


def name_of(named: NamedFile) -> str:
    """The file's name. Run ids may have letters that a URL would escape, so they are encoded."""
    run = named.run_id.encode("punycode").decode()
    place = f"{named.index:05d}-{named.total:05d}"
    return f"part-{place}-{named.token}-{named.xxh3}-{run}.parquet"


def parse(path: str) -> NamedFile | None:
    """What a file's name says; None for files that no publish of ours wrote."""
    match = _NAME.match(path.rpartition("/")[2])
    if match is None:
        return None
    try:
        run_id = match["run"].encode().decode("punycode")
    except (UnicodeError, ValueError):
        return None
    return NamedFile(
        run_id=run_id,
        token=match["token"],
        index=int(match["index"]),
        total=int(match["total"]),
        xxh3=match["xxh3"],
    )


def whole(live: Collection[LiveFile]) -> NamedFile | None:
    """One of the files, if together they are all that one publish wrote and nothing else."""
    named = [parse(file.path) for file in live]
    first = next(iter(named), None)
    if first is None or any(file.deletes for file in live):
        return None
    same = all(one and (one.token, one.run_id) == (first.token, first.run_id) for one in named)
    places = {one.index for one in named if one}
    return first if same and places == set(range(first.total)) else None


def encode(rows: Rows, as_table: Encoding) -> Iterator[NewFile]:
    """The files of a run, one at a time."""
    total = rows.parts
    token = uuid.uuid4().hex[:12]
    for index, (_, part) in enumerate(rows.shards()):
        data = encoded(as_table(part))
        named = NamedFile(
            run_id=rows.run_id,
            token=token,
            index=index,
            total=total,
            xxh3=files.hash_bytes(data),
        )
        yield NewFile(name=name_of(named), data=data, rows=len(part))


def verified(path: str, xxh3: str, read: Callable[[str], bytes] | None = None) -> bytes:
    """The content of a file whose hash is known.

    Raises:
        StorageError: it is missing, or its content is another one.
    """
    try:
        data = (read or files.read_bytes)(path)
    except FileNotFoundError as err:
        raise StorageError("a published file is missing", where=path, do=REPAIR) from err
    found = files.hash_bytes(data)
    if found != xxh3:
        raise StorageError(
            "a published file is damaged",
            expected=f"xxh3 {xxh3}",
            got=f"{found}, {len(data)} bytes",
            where=path,
            do=REPAIR,
        )
    return data


def decoded(data: bytes) -> pa.Table:
    """The rows of a Parquet file in memory."""
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
        return file.read(use_threads=False)


def check_rows(table: pa.Table, run_id: str, where: str) -> None:
    """Raise `StorageError` unless every row names its user and is of the run.

    What is copied from one partition to another is tried with this: a count would not notice rows
    that a reader could not make sense of.
    """
    runs = table["run_id"].unique().to_pylist()
    if table["user_id"].null_count or runs not in ([], [run_id]):
        raise StorageError(
            "rows to be copied are not those of the run",
            expected=f"a user in every row, run_id {run_id}",
            got=f"{table['user_id'].null_count} rows without a user, run_id {quoted(runs)}",
            where=where,
            do="Nothing was changed.",
        )


def changed_by_others(live: Collection[LiveFile], where: str) -> StorageError:
    """The error of a partition whose files are not those of one publish."""
    others = sum(parse(file.path) is None for file in live)
    return StorageError(
        "what readers see is not what a run published",
        expected="the files of one publish, all of them and no others",
        got=f"{len(live)} files, {others} of them by others",
        where=where,
        do=REPAIR,
    )


def holds(live: Collection[LiveFile], run_id: str) -> bool:
    """Whether these are the files of one publish of the run, all of them."""
    named = whole(live)
    return named is not None and named.run_id == run_id


REPAIR = "Run it again: `nightshelf run` publishes its rows anew where they are damaged."

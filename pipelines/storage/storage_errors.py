"""What goes wrong in the libraries below files, said as one of our errors.

Disks, stores, Arrow, polars and their clients each have error trees of their own. Here they become
six kinds, told by class and number and, but for Arrow's client of S3, never by text:

    access    AccessError (exit 2)       no credentials, no permission, no place for a file
    missing   MissingFileError           nothing is at the path
    full      StorageError (exit 4)      the disk, the inodes, a quota or the memory
    away      StoreAwayError (exit 4)    a store that does not answer, or is busy: tried again first
    damage    DamagedFileError           bytes that cannot be decoded
    other     StorageError (exit 4)      anything else that a file system says

What stores' clients raise is told by client_errors.py.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import polars as pl
import pyarrow as pa
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from pipelines.storage.client_errors import Kind, of_client
from schemas.errors import (
    AccessError,
    DamagedFileError,
    MissingFileError,
    NightshelfError,
    StorageError,
    is_panic,
)

P = ParamSpec("P")
T = TypeVar("T")

WAIT = wait_random_exponential(multiplier=0.2, max=5.0)  # between tries, in seconds
STOP = stop_after_attempt(5)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_NO_ACCESS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EISDIR,
    errno.EEXIST,  # a file is where a folder should be
    errno.ENOTDIR,
    errno.EREMCHG,  # s3fs: the bucket is in another region
)
# Arrow's own client of S3 has no class and no field for it: the code stands in its words.
_ARROW_CODE = re.compile(r"\bAWS Error ([A-Z_]+)\b")
_ARROW_CODES: dict[str, Kind] = {
    **dict.fromkeys(
        ("ACCESS_DENIED", "INVALID_CLIENT_TOKEN_ID", "INVALID_ACCESS_KEY_ID", "INVALID_SIGNATURE")
        + ("SIGNATURE_DOES_NOT_MATCH", "UNRECOGNIZED_CLIENT", "MISSING_AUTHENTICATION_TOKEN")
        + ("REQUEST_EXPIRED",),
        "access",
    ),
    **dict.fromkeys(("NO_SUCH_BUCKET", "NO_SUCH_KEY", "RESOURCE_NOT_FOUND"), "missing"),
    **dict.fromkeys(
        ("NETWORK_CONNECTION", "INTERNAL_FAILURE", "SERVICE_UNAVAILABLE", "SLOW_DOWN")
        + ("THROTTLING", "REQUEST_TIMEOUT"),
        "away",
    ),
}
_WORDS: dict[Kind, tuple[str, str]] = {
    "access": ("may not be {done}", "Give the credentials or permission it needs, or another path"),
    "missing": ("cannot be {done}", ""),
    "full": (
        "could not be {done}",
        "Free space, inodes or memory there, then run the same command again",
    ),
    "away": (
        "could not be {done}: the store does not answer",
        "Run the same command again once it does; what is done is kept",
    ),
    "damage": ("cannot be {done}", ""),
    "other": (
        "could not be {done}",
        "Check permissions and free space, then run the same command again",
    ),
}


class StoreAwayError(StorageError):
    """A store does not answer, or is busy."""

    kind = "away"
    tried = False  # as often as it is worth


_CLASSES: dict[Kind, type[NightshelfError]] = {
    "access": AccessError,
    "missing": MissingFileError,
    "full": StorageError,
    "away": StoreAwayError,
    "damage": DamagedFileError,
    "other": StorageError,
}


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def kind_of(error: BaseException) -> Kind | None:
    """What an error of a library is; None for those that are no file's, as a fault of ours is."""
    if is_panic(error):
        return "damage"
    if isinstance(error, MemoryError | pa.ArrowMemoryError):
        return "full"
    if (known := of_client(error)) is not None:
        return known
    if isinstance(error, FileNotFoundError | pl.exceptions.NoDataError):
        return "missing"
    if isinstance(error, TimeoutError | ConnectionError | asyncio.CancelledError):
        return "away"
    if isinstance(error, OSError) and error.errno is not None:
        return _of_number(error.errno)
    if isinstance(error, PermissionError | IsADirectoryError | NotADirectoryError):
        return "access"  # stores' clients raise them without a number
    if isinstance(error, OSError) and (code := _ARROW_CODE.search(str(error))) is not None:
        return _ARROW_CODES.get(code[1], "damage")
    if isinstance(error, OSError | pa.ArrowException | pl.exceptions.PolarsError | zlib.error):
        return "damage"
    if isinstance(error, json.JSONDecodeError | UnicodeError | EOFError):
        return "damage"
    return "damage" if isinstance(error, RecursionError) else None  # brackets without end


def _of_number(number: int) -> Kind:
    if number in _FULL:
        return "full"
    if number in _NO_ACCESS:
        return "access"
    return "missing" if number == errno.ENOENT else "away"


def is_damage(error: BaseException) -> bool:
    """Whether an error may say that a file's content cannot be decoded, and not that it could not
    be had: Arrow raises OSErrors without a number for pages that are no Parquet. So do some stores
    when they are busy, which is why it is tried again all the same.
    """
    if isinstance(error, DamagedFileError):
        return True
    if isinstance(error, NightshelfError):
        return error.__cause__ is not None and is_damage(error.__cause__)
    return kind_of(error) == "damage"


def translate(
    error: BaseException, path: str, *, done: str = "read", what: str = "a file"
) -> NightshelfError | None:
    """One of ours for an error of a library; None where `kind_of` knows none.

    Args:
        error: what was raised. One of ours is given back as it is.
        path: what was being worked on.
        done: what was being done to it: read, written, listed.
        what: what it is.
    """
    if isinstance(error, NightshelfError):
        return error
    kind = kind_of(error)
    if kind is None:
        return None
    words, remedy = _WORDS[kind]
    if done != "read" and kind in (
        "damage",
        "missing",
    ):  # some libraries give a full disk no number
        words, remedy = _WORDS["other"]
        if kind == "damage":
            kind = "full" if _no_room(path) else "other"
            words, remedy = _WORDS[kind]
    got = first_line(error)
    if not isinstance(error, OSError):
        got = f"{type(error).__name__}: {got}" if got != type(error).__name__ else got
    ours = _CLASSES[kind](
        f"{what} {words.format(done=done)}",
        got=got,
        where=path or None,
        do=f"{remedy}." if remedy else None,
    )
    ours.__cause__ = error
    return ours


def _no_room(path: str) -> bool:
    """Whether the disk of a path of this machine has no blocks or no inodes left."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < 1 << 16 or (disk.f_files > 0 and disk.f_favail == 0)


@contextmanager
def translated(path: str, *, done: str = "read", what: str = "a file") -> Iterator[None]:
    """What libraries raise inside the block leaves it as one of ours; see `translate`.

    Raises:
        AccessError, MissingFileError, DamagedFileError, StorageError: as `kind_of` says.
    """
    try:
        yield
    except NightshelfError:
        raise
    except (Exception, asyncio.CancelledError) as err:
        if (ours := translate(err, path, done=done, what=what)) is None:
            raise
        raise ours from err
    except BaseException as err:
        if not is_panic(err):
            raise
        ours = translate(err, path, done=done, what=what)
        assert ours is not None, "a panic has a kind"
        raise ours from err


def _may_pass(error: BaseException) -> bool:
    """A busy store or a dropped connection may pass; a missing file or a full disk will not. An
    error without a number is a damaged page or a busy store, and nobody knows which.
    """
    if isinstance(error, StoreAwayError):
        return not error.tried
    if isinstance(error, NightshelfError):
        cause = error.__cause__
        return cause is not None and not isinstance(cause, NightshelfError) and _may_pass(cause)
    if isinstance(error, OSError) and not isinstance(error, pa.ArrowException):
        return kind_of(error) in ("away", "damage")
    return isinstance(error, Exception) and kind_of(error) == "away"


def retried(function: Callable[P, T]) -> Callable[P, T]:
    """Try again, with longer and longer pauses, what may pass; the last error is raised."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        tries = Retrying(retry=retry_if_exception(_may_pass), wait=WAIT, stop=STOP, reraise=True)
        try:
            return tries(function, *args, **kwargs)
        except StoreAwayError as err:
            err.tried = True  # whoever called is not to do it all again
            raise

    return call

"""Writes that are whole or not there: what fails midway leaves nothing at the final name."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pipelines.storage.storage_errors import retried, translated
from pipelines.storage.stores import can_rename, filesystem, has_whole_puts, local_path, make_folder

_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@contextmanager
def atomic_target(path: str) -> Iterator[str]:
    """A local file to write, which becomes `path` at the end of the block, or is removed on an
    error: what fails midway leaves nothing at `path`.

    On a local disk this is a rename after fsync. What goes to a store is whole here before any of
    it is sent, and an object store's put is whole by itself; elsewhere it is a rename too.

    Raises:
        AccessError: nothing may be written there.
        StorageError: the file could not be written.
    """
    fs, inside = filesystem(path)
    with translated(path, done="written"):
        if isinstance(fs, LocalFileSystem):
            with _draft_beside(fs, inside) as draft:
                yield draft
            return
        with TemporaryDirectory(prefix="nightshelf-") as folder:
            draft = f"{folder}/draft"
            yield draft
            _put(fs, draft, inside)


@contextmanager
def _draft_beside(fs: fsspec.AbstractFileSystem, path: str) -> Iterator[str]:
    """A file in the same folder, renamed to `path` at the end."""
    folder, _, name = path.rpartition("/")
    draft = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        fs.makedirs(folder, exist_ok=True)
        yield draft
        with open(draft, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(draft, path)
    finally:
        with suppress(OSError):  # renamed, cleared, never made: the error that counts is another
            os.remove(draft)


def _put(fs: fsspec.AbstractFileSystem, draft: str, path: str) -> None:
    """Send a file to a store, where it is whole when it appears."""
    folder, _, name = path.rpartition("/")
    make_folder(fs, folder)
    if has_whole_puts(fs) or not can_rename(fs):
        fs.put_file(draft, path)
        fs.invalidate_cache()
        return
    target = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        fs.put_file(draft, target)
        fs.invalidate_cache()
        if fs.exists(path):  # not every store renames over a file
            fs.rm_file(path)
        fs.mv(target, path)
    except BaseException:
        with suppress(Exception):  # the error that counts is the one before
            fs.rm_file(target)
        raise


@retried
def create(path: str, data: bytes) -> bool:
    """Create a file that is whole when it appears; False when the name is taken.

    On a mount without hard links it is empty for an instant before it is whole.

    Raises:
        AccessError: nothing may be written there.
        StorageError: it cannot be written.
    """
    local = local_path(path)
    with translated(path, done="created"):
        try:
            if local is not None:
                _link(local, data)
            else:
                fs, inside = filesystem(path)
                fs.pipe_file(inside, data, mode="create")
        except FileExistsError:
            return False
    return True


def _link(path: str, data: bytes) -> None:
    folder, _, name = path.rpartition("/")
    os.makedirs(folder, exist_ok=True)
    draft = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with open(draft, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        try:
            os.link(draft, path)
        except OSError as err:
            if err.errno not in _NO_LINKS:
                raise
            # A mount without hard links: the name is taken first, and gets its content after that.
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            os.replace(draft, path)
    finally:
        with suppress(OSError):
            os.remove(draft)

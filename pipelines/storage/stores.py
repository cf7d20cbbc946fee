"""Paths and URLs as file systems: which library serves one, and what its kind can do."""

from __future__ import annotations

import re

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipelines.storage.storage_errors import translated
from schemas.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_NO_HADOOP = re.compile(r"\bload lib(jvm|hdfs)\b")  # Arrow has no class for it
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "r2"}


def join(base: str, *parts: str) -> str:
    """A path below `base`, which may be a URL."""
    return "/".join([base.rstrip("/"), *parts])


def filesystem(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL, and the path inside it. `::` is part of a name.

    Raises:
        ConfigError: the package of its protocol is missing, or it has no credentials.
    """
    scheme = path.partition("://")[0] if _URL.match(path) else "file"
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as err:
        raise ConfigError(
            "the path cannot be opened",
            got=str(err),
            where=path,
            do="Install the fsspec package of this protocol (s3fs, gcsfs, adlfs).",
        ) from err
    with translated(path, done="opened", what="the store"):
        try:
            fs = fsspec.filesystem(scheme, **kind._get_kwargs_from_urls(path))
        except OSError as err:
            if _NO_HADOOP.search(str(err)) is None:
                raise
            raise ConfigError(
                "the path cannot be opened",
                got=str(err),
                where=path,
                do="Install Hadoop's client and Java, and set HADOOP_HOME, JAVA_HOME and "
                "CLASSPATH (hadoop classpath --glob).",
            ) from err
        return fs, str(fs._strip_protocol(path))


def local_path(path: str) -> str | None:
    """The path on this machine's disk, or None for a remote one."""
    fs, inside = filesystem(path)
    return inside if isinstance(fs, LocalFileSystem) else None


def has_whole_puts(fs: fsspec.AbstractFileSystem) -> bool:
    """Whether a put is whole by itself: nothing is at the name before its last byte has come."""
    return bool(_protocols(fs) & (_OBJECT_STORES | {"memory"}))


def can_rename(fs: fsspec.AbstractFileSystem) -> bool:
    """Whether files can be moved to another name, by the file system or by copying them in it."""
    kind, plain = type(fs), (fsspec.AbstractFileSystem, AsyncFileSystem)
    names = ("mv", "mv_file", "_mv_file", "cp_file", "_cp_file")
    return any(getattr(kind, n, None) not in [getattr(p, n, None) for p in plain] for n in names)


def _protocols(fs: fsspec.AbstractFileSystem) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def make_folder(fs: fsspec.AbstractFileSystem, folder: str) -> None:
    """Make a folder where a store has folders. In an object store it would be a new bucket."""
    if not _protocols(fs) & _OBJECT_STORES:
        with translated(folder, done="made", what="a folder"):
            fs.makedirs(folder, exist_ok=True)

"""A path or URL that names a place: where a setting of the configuration may lead.

A URL without a bucket, or with its slashes forgotten, is a relative path to most libraries: they
would make a folder `s3:` in the working directory, or write to the root of the file system.
"""

from __future__ import annotations

import re
from pathlib import Path

from fsspec.registry import known_implementations

_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://(.*)$", re.DOTALL)
_PREFIX = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(?!//)(.*)$", re.DOTALL)
_DISK = ("file", "local")
_BUCKETS = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "tos", "r2", "hf")
_READ_ONLY = ("http", "https", "data", "git", "github", "zip", "tar", "libarchive", "reference")
_VARIABLE = re.compile(r"\$\{[A-Za-z_]\w*\}|(?:^|(?<=/))\$[A-Za-z_]\w*|%[A-Za-z_]\w*%")
_WINDOWS = re.compile(r"^(?:[A-Za-z]:[\\/]|\\\\)")
_HOSTS = ("http", "https", "ftp", "sftp", "ssh", "smb")  # others have one by default, as hdfs has


def place(path: str) -> str:
    """The path as it is used: `~/x` from the home folder, `file:///x` and `file:/x` as `/x`, a
    scheme in small letters (`S3://b` is `s3://b`; to libraries it would be a folder `S3:`).

    Raises:
        ValueError: it names no place, with what is wrong in a few words.
    """
    if not path.strip():
        raise ValueError("names no place: it is empty")
    if "\0" in path:
        raise ValueError("names no place: it holds a NUL character")
    if path.startswith("~"):
        path = _from_home(path)
    if url := _URL.match(path):
        path = _of_url(path, url[1].lower(), url[2])
    elif (prefix := _PREFIX.match(path)) and prefix[1].lower() in known_implementations:
        scheme, rest = prefix[1].lower(), prefix[2]
        if scheme not in _DISK or not rest.startswith("/"):
            raise ValueError(f"names no place: a URL begins with {scheme}://")
        path = rest
    if not path.strip("/"):
        raise ValueError("names no place: it is the root of the file system")
    return path


def written_place(path: str) -> str:
    """A `place` that a run writes to.

    Raises:
        ValueError: as `place`; or nothing can be written there; or it looks as if a shell, or
            Windows, were to read it, and would become a folder of that name.
    """
    path = place(path)
    url = _URL.match(path)
    if url and url[1] in _READ_ONLY:
        raise ValueError(f"cannot be written to: {url[1]}:// is only read")
    if unfilled := _VARIABLE.search(path):
        raise ValueError(
            f"holds {unfilled[0]}, which nothing fills in here; write the path, or give it "
            "by --set, where the shell fills it in"
        )
    if _WINDOWS.match(path):
        raise ValueError("is a path of Windows, and would be a folder of that name here")
    return path


def _of_url(path: str, scheme: str, rest: str) -> str:
    if not rest.strip("/"):
        raise ValueError(f"names no place: nothing stands behind {scheme}://")
    if rest.startswith("/") and scheme in _BUCKETS + _HOSTS:
        raise ValueError(f"names no place: no bucket or host stands behind {scheme}://")
    if scheme not in _DISK:
        return f"{scheme}://{rest}"
    if not rest.startswith("/"):
        raise ValueError(f"names no place on this machine: expected {scheme}:///{rest}")
    return rest


def _from_home(path: str) -> str:
    try:
        return str(Path(path).expanduser())
    except RuntimeError as err:  # no such user, or none that has a home
        raise ValueError("names no place: its home folder is not known") from err

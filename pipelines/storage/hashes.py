"""Hashes of content: xxh3-128, as hex."""

from __future__ import annotations

import xxhash

_CHUNK = 1 << 22


def hash_bytes(*parts: bytes) -> str:
    """Hash of the parts, one after the other."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return str(digest.hexdigest())


def hash_local(path: str) -> str:
    """Hash of a file of this machine."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as handle:
        while block := handle.read(_CHUNK):
            digest.update(block)
    return str(digest.hexdigest())

"""Allocators that give memory back, so that what a run holds follows its shards.

Threads that read and rank beside the engine get arenas of their own from glibc, each of which keeps
what it ever held; and polars' allocator keeps freed pages. Measured over 100,000 users: 150 MiB of
740. Takes effect where it is called before the libraries are loaded, and in processes that are
started afterwards.
"""

from __future__ import annotations

import ctypes
import os

_M_ARENA_MAX = -8  # malloc.h of glibc


def return_freed_memory() -> None:
    """One arena for all threads, and freed pages to the system. Does nothing where it cannot."""
    os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)

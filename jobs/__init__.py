"""How a run is launched: the command line and the launchers. Loads no torch and no pyspark."""

import ctypes
import os


def _return_freed_memory() -> None:
    """One arena for all threads, and freed pages to the system: what a run holds follows shards.

    Threads that read and rank beside the engine get arenas of their own from glibc, each of which
    keeps what it ever held; and polars' allocator keeps freed pages. Measured over 100,000 users:
    150 MiB of 740. Takes effect where the libraries are loaded afterwards, and in processes that
    are started afterwards; does nothing where it cannot.
    """
    os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-8, 1)  # M_ARENA_MAX of glibc's malloc.h


_return_freed_memory()  # before polars and pyarrow are loaded

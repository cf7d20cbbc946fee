"""Functions on their way to executors, where another project's packages may stand first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark import cloudpickle

Batches = Iterator[pa.RecordBatch]


def carried(function: Callable[[Batches], Batches]) -> Callable[[Batches], Batches]:
    """`function` for `mapInArrow`, read in the executor after our packages are preferred there.

    The outer function travels as code and names no module of ours; the inner one names several.
    """
    inside = cloudpickle.dumps(function)

    def run(batches: Batches) -> Batches:
        import importlib
        import pickle

        importlib.import_module("nightshelf")
        yield from pickle.loads(inside)(batches)

    return run

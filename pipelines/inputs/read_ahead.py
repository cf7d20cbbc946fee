"""Read the next shard while the engine works on this one.

Only a guess: a shard that was not guessed is read when it is wanted, and one that was read in vain
is forgotten.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from pipelines.catalog.build import Catalog
from pipelines.inputs.read_batches import ShardInput, read_shard
from schemas.runs import RunPlan, Shard


class ReadAhead:
    """Reads shards of one run, at most one of them ahead of time. A context manager."""

    def __init__(self, plan: RunPlan, catalog: Catalog | None) -> None:
        self._plan = plan
        self._catalog = catalog
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._next: tuple[int, Future[ShardInput]] | None = None

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def guess(self, shard: Shard | None) -> None:
        """Begin to read a shard that will probably be wanted."""
        if shard is not None and (self._next is None or self._next[0] != shard.index):
            read = self._thread.submit(read_shard, self._plan, shard, self._catalog)
            self._next = (shard.index, read)

    def take(self, shard: Shard) -> ShardInput:
        """A shard's rows, read already or now.

        Raises:
            StorageError: the shard file is missing or damaged.
        """
        guessed, self._next = self._next, None
        if guessed is not None and guessed[0] == shard.index:
            return guessed[1].result()
        return read_shard(self._plan, shard, self._catalog)

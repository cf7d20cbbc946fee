"""`run.workers: 0`: shards one after the other in this process."""

from __future__ import annotations

import gc
from collections import deque
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from jobs.running.launcher import Progress
from jobs.running.retries import Attempts, Next, needs_new_engine, next_step
from jobs.running.shard_worker import start_engine, take_and_guess
from pipelines.catalog.build import Catalog
from pipelines.catalog.items import open_items
from pipelines.inputs.read_ahead import ReadAhead
from pipelines.shards.run_shard import run_shard
from schemas.errors import NightshelfError
from schemas.runs import RunPlan, Shard

if TYPE_CHECKING:
    from engine.engine import Engine


def run_inline(plan: RunPlan, shards: list[Shard], progress: Progress) -> dict[int, str]:
    """Run the shards; the reasons of those that failed, by shard.

    Raises:
        NightshelfError: the engine cannot start, or what no other attempt would do better.
    """
    attempts = Attempts(plan.config.run.max_attempts, progress)
    waiting = deque(shards)
    catalog = open_items(plan)
    with _Holder(plan, catalog) as held, ReadAhead(plan, catalog) as ahead:
        held.start()
        while waiting:
            shard = waiting.popleft()
            try:
                _attempt(plan, shard, held, ahead, waiting[0] if waiting else None, progress)
            except NightshelfError as err:
                if attempts.failed_once(shard, err):
                    waiting.append(shard)
                if not waiting or not needs_new_engine(err):
                    continue
                why_not = held.renew(err)
                if why_not is not None:  # a device that is lost to this process comes with another
                    for left in waiting:
                        attempts.failed[left.index] = f"{err}; then no new engine: {why_not}"
                    break
    return attempts.failed


def _attempt(
    plan: RunPlan,
    shard: Shard,
    held: _Holder,
    ahead: ReadAhead,
    following: Shard | None,
    progress: Progress,
) -> None:
    counted = 0

    def advance(users: int) -> None:
        nonlocal counted
        counted += users
        progress.advance(users)

    try:
        run_shard(plan, shard, held.engine, held.catalog, advance, take_and_guess(ahead, following))
    except NightshelfError:
        progress.advance(-counted)
        raise


class _Holder:
    """The engine of this process, and another one in its place. A context manager."""

    def __init__(self, plan: RunPlan, catalog: Catalog | None) -> None:
        self._plan = plan
        self._stack = ExitStack()
        self.catalog = catalog

    def __enter__(self) -> _Holder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def start(self) -> None:
        """Load the engine.

        Raises:
            NightshelfError: it cannot start, also not when it is tried again.
        """
        tries = 0
        while True:
            try:
                self.engine: Engine = self._stack.enter_context(
                    start_engine(self._plan, self.catalog)
                )
            except NightshelfError as err:
                tries += 1
                if next_step(err, tries, self._plan.config.run.max_attempts) is not Next.again:
                    raise
            else:
                return

    def renew(self, after: NightshelfError) -> NightshelfError | None:
        """A new engine for one that may be broken; why there is none."""
        self._stack.close()
        del self.engine
        # Frames of the error hold what the old engine had on its device.
        after.__cause__ = after.__context__ = after.__traceback__ = None
        gc.collect()
        try:
            self.start()
        except NightshelfError as err:
            return err
        return None

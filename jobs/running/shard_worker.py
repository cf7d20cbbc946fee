"""What runs shards, in whatever process: an engine, its items, and what is read ahead for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from pipelines.catalog.build import Catalog
from pipelines.catalog.items import open_items
from pipelines.inputs.read_ahead import ReadAhead
from pipelines.inputs.read_batches import ShardInput
from pipelines.inputs.unchanged import check_model
from pipelines.shards.run_shard import run_shard
from schemas.errors import EngineError, NightshelfError, ShardFailedError, is_panic
from schemas.runs import RunPlan, Shard

if TYPE_CHECKING:
    from engine.engine import Engine


def set_environment(threads: int) -> None:
    """Variables that torch and tokenizers read when they are loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Threads that wait must sleep: spinning ones stall each other as soon as the machine is shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class ShardWorker:
    """One engine and the shards that it runs, one after the other."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.started = False
        self._stack = ExitStack()

    def start(self) -> None:
        """Load everything. It loads torch: call it where the device is already bound.

        Raises:
            ChangedError: the model that it loaded is not the one that was planned with.
            EngineError: a package is missing, or the engine cannot start.
        """
        with panics_are_failures("the engine", EngineError), ExitStack() as stack:
            self._catalog = open_items(self.plan)
            self._engine = stack.enter_context(_engine(self.plan, self._catalog))
            self._ahead = stack.enter_context(ReadAhead(self.plan, self._catalog))
            self._stack = stack.pop_all()
        self.started = True

    def run(self, shard: Shard, following: Shard | None, progress: Callable[[int], None]) -> None:
        """Get a shard its receipt, and read the one that probably follows while it is scored.

        Raises: as `run_shard`.
        """

        def read(shard: Shard) -> ShardInput:
            data = self._ahead.take(shard)
            self._ahead.guess(following)
            return data

        run_shard(self.plan, shard, self._engine, self._catalog, progress, read)

    def close(self) -> None:
        """Free the device."""
        self._stack.close()


@contextmanager
def _engine(plan: RunPlan, catalog: Catalog | None) -> Iterator[Engine]:
    try:
        from engine.engine import open_engine
    except ImportError as err:
        raise EngineError(
            "the engine cannot be loaded",
            got=str(err),
            do="Install its packages: pip install 'nightshelf[torch]'.",
        ) from err
    with open_engine(plan.config, catalog.trie if catalog else None) as engine:
        check_model(plan)  # after it was loaded: what is loaded is what was planned
        yield engine


def serve(
    plan: RunPlan,
    receive: Callable[[], tuple[Shard, Shard | None] | None],
    send: Callable[..., None],
) -> None:
    """A worker's life, at the far end of a pool: start the engine, run shards until there are none.

    Args:
        receive: waits for a shard and the one that probably follows it; None: there are no more.
        send: takes the name of a report (`Pool.poll` in jobs/running/scheduler.py has them) and its
            arguments without the worker's place. They can be pickled.
    """
    worker = ShardWorker(plan)
    try:
        worker.start()
    except NightshelfError as err:
        send("cannot_start", err)
        return
    try:
        send("ready")
        while (given := receive()) is not None:
            try:
                worker.run(*given, lambda users: send("users", users))
            except NightshelfError as err:
                send("failed", err)
            else:
                send("done")
    finally:
        worker.close()


@contextmanager
def panics_are_failures(
    what: str, kind: type[NightshelfError] = ShardFailedError
) -> Iterator[None]:
    """Turn a panic of a library written in Rust into an error of ours: it is no `Exception`.

    Raises:
        NightshelfError: of this kind, for a panic.
    """
    try:
        yield
    except BaseException as err:
        if not is_panic(err):
            raise
        first = (str(err).splitlines() or [""])[0]
        raise kind(f"{what} failed", got=f"a library panicked: {first}") from err

"""What a worker process is, whatever started it: environment, engine, what it reads ahead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipelines.catalog.build import Catalog
from pipelines.inputs.read_ahead import ReadAhead
from pipelines.inputs.read_batches import ShardInput
from pipelines.inputs.unchanged import check_model
from schemas.errors import EngineError
from schemas.runs import RunPlan, Shard

if TYPE_CHECKING:
    from engine.engine import Engine


def set_environment(threads: int) -> None:
    """Variables that torch and tokenizers read when they are loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Threads that wait must sleep: spinning ones stall each other as soon as the machine is shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@contextmanager
def start_engine(plan: RunPlan, catalog: Catalog | None) -> Iterator[Engine]:
    """The engine of this process, until the block ends. It loads torch: call it where the device is
    already bound.

    Raises:
        ChangedError: the model that it loaded is not the one that was planned with.
        EngineError: a package is missing, or the engine cannot start.
    """
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


def take_and_guess(ahead: ReadAhead, following: Shard | None) -> Callable[[Shard], ShardInput]:
    """Reads a shard, and then the one that probably follows while this one is scored."""

    def take(shard: Shard) -> ShardInput:
        data = ahead.take(shard)
        ahead.guess(following)
        return data

    return take

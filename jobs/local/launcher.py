"""`run.launcher: local`: shards in processes of this machine, or in the command's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from engine.backends.registry import spec_of
from engine.device import no_gpu, num_cpus, visible_gpus
from jobs.local.inline import InlinePool
from jobs.local.processes import Device, ProcessPool
from jobs.running.scheduler import Pool, PoolLauncher
from schemas.errors import EngineError, NightshelfError
from schemas.runs import RunPlan
from schemas.settings import RunConfig


class LocalLauncher(PoolLauncher):
    """Runs shards in worker processes of this machine; with 0 workers, in this process."""

    name = "local"

    def locate(self, config: RunConfig) -> RunConfig:
        """The configuration as it is: its inputs are files.

        Raises:
            EngineError: this Python lacks the backend's packages.
        """
        for problem in spec_of(config.engine.backend).missing_packages():
            raise problem
        return config

    def problems(self, config: RunConfig) -> Iterator[NightshelfError]:
        """Inputs that are tables of Spark's catalog; GPUs that this machine has not."""
        yield from super().problems(config)
        wanted, device = config.run.workers, config.engine.device
        gpus = visible_gpus() if device != "cpu" else []
        if isinstance(wanted, int) and gpus and wanted > len(gpus):
            yield _too_few(gpus, wanted)
        if device != "cuda" or gpus:
            return
        with suppress(NightshelfError):  # no such backend: said already
            if spec_of(config.engine.backend).gpu != "never":
                yield no_gpu()

    def pool(self, plan: RunPlan, num_shards: int) -> Pool:
        """One worker per device.

        Raises:
            EngineError: there are fewer GPUs than workers.
        """
        if plan.config.run.workers == 0:
            return InlinePool(plan)
        return ProcessPool(plan, _devices(plan, num_shards))


def _devices(plan: RunPlan, num_shards: int) -> list[Device]:
    """One device per worker: GPUs first come first served, else shares of the processors."""
    wanted = plan.config.run.workers
    gpus = visible_gpus() if plan.config.engine.device != "cpu" else []
    if gpus:
        count = len(gpus) if wanted == "auto" else wanted
        if count > len(gpus):
            raise _too_few(gpus, count)
        return [Device(gpu, num_cpus()) for gpu in gpus[: min(count, num_shards)]]
    count = min(1 if wanted == "auto" else wanted, num_shards)
    return [Device(None, max(1, num_cpus() // count))] * count


def _too_few(gpus: list[str], workers: int) -> EngineError:
    return EngineError(
        "more workers than GPUs",
        expected=f"at most {len(gpus)}",
        got=f"run.workers {workers}",
        do="Set run.workers to auto, or engine.device to cpu.",
        field="run.workers",
    )

"""Is Spark configured so that a worker owns its GPUs? Reads settings only; no pyspark here.

Spark hands out *slots*: a task gets `spark.task.resource.gpu.amount` of an executor's
`spark.executor.resource.gpu.amount` addresses. Both must be what one engine takes: then there is
one engine per executor, it keeps its device, and there is never a second one on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from schemas.errors import ConfigError
from schemas.settings import RunConfig

Conf = Callable[[str], str | None]  # the value of a Spark setting, None where it is not set


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """What Spark was told about GPUs, as far as it was."""

    master: str
    executor: str | None  # amounts, as they are written
    task: str | None

    @classmethod
    def of(cls, conf: Conf, resource: str) -> GpuSettings:
        """Read them."""
        return cls(
            master=conf("spark.master") or "",
            executor=conf(f"spark.executor.resource.{resource}.amount"),
            task=conf(f"spark.task.resource.{resource}.amount"),
        )


def is_local(master: str) -> bool:
    """Whether a master URL is `local`, `local[4]`, `local[*]`: one process, no resources."""
    return master == "local" or master.startswith("local[")


def check_conf(config: RunConfig, conf: Conf) -> None:
    """Raise `ConfigError` where Spark's configuration would put engines where they cannot be."""
    if _is_true(conf("spark.speculation")):
        raise ConfigError(
            "spark.speculation is on",
            expected="spark.speculation=false",
            do="A copy of a slow shard would take a second GPU and help nobody.",
        )
    if conf("spark.python.worker.reuse") == "false":
        raise ConfigError(
            "spark.python.worker.reuse is off",
            expected="spark.python.worker.reuse=true",
            do="Every shard would load the model again.",
        )
    settings = GpuSettings.of(conf, config.spark.resource)
    if is_local(settings.master):
        _check_local(config, settings)
    elif config.spark.profile == "executor":
        _check_executor_profile(settings, config, conf)
    else:
        _check_amounts(config, settings)


def _is_true(value: str | None) -> bool:
    return (value or "").strip().lower() == "true"


def _check_local(config: RunConfig, settings: GpuSettings) -> None:
    name = config.spark.resource
    if settings.task is not None:
        raise ConfigError(
            f"spark.task.resource.{name}.amount waits forever with master {settings.master}",
            expected="a standalone, YARN or Kubernetes master",
            got=settings.task,
            do="Spark's local mode has no resources: leave the setting out.",
        )
    if config.spark.profile != "none":
        raise ConfigError(
            f"spark.profile needs executors, and master {settings.master} has none",
            expected="spark.profile: none, or another master",
            got=config.spark.profile,
        )
    if config.engine.device == "cuda":
        raise ConfigError(
            f"master {settings.master} hands out no GPUs",
            expected="engine.device: cpu or auto, or another master",
            got="engine.device: cuda",
            do="On one machine the local launcher uses every GPU: nightshelf run CONFIG.",
        )


def _check_amounts(config: RunConfig, settings: GpuSettings) -> None:
    """Executor and task amounts both are what one engine takes; or there are none at all."""
    name = config.spark.resource
    executor, task = (f"spark.{owner}.resource.{name}.amount=1" for owner in ("executor", "task"))
    by_profile = config.spark.profile == "task"
    if settings.executor is None:
        if config.engine.device == "cuda" or by_profile or settings.task is not None:
            raise ConfigError(
                "no GPU resource is configured",
                expected=executor + ("" if by_profile else f" and {task}"),
                got=f"spark.executor.resource.{name}.amount is not set",
                do="Executors find their GPUs by a discovery script; see docs/spark.md.",
            )
        return
    if settings.task is None and not by_profile:
        raise ConfigError(
            "executors have GPUs, and tasks ask for none: more task slots than GPUs",
            expected=task,
            got=f"spark.task.resource.{name}.amount is not set",
            do="Set it, or spark.profile: task, which asks for GPUs in the scoring stage only.",
        )
    if settings.task is not None and not by_profile and _number(settings.task) != 1:
        few = _number(settings.task) < 1
        raise ConfigError(
            "more task slots than GPUs" if few else "a task would own more GPUs than it uses",
            expected=task,
            got=f"spark.task.resource.{name}.amount={settings.task}",
            do="One engine takes one GPU.",
        )
    if _number(settings.executor) != 1:
        raise ConfigError(
            "an executor would hold the GPUs of several engines",
            expected=f"{executor}, and as many executors as there are engines",
            got=f"spark.executor.resource.{name}.amount={settings.executor}",
            do="Spark gives any of an executor's tasks to any of its Python workers, and an engine "
            "cannot change its GPU.",
        )


def _check_executor_profile(settings: GpuSettings, config: RunConfig, conf: Conf) -> None:
    name = config.spark.resource
    if not _is_true(conf("spark.dynamicAllocation.enabled")):
        raise ConfigError(
            "spark.profile: executor needs dynamic allocation",
            expected="spark.dynamicAllocation.enabled=true",
            do="Without it, use spark.profile: task, or none.",
        )
    if settings.executor is not None or settings.task is not None:
        raise ConfigError(
            "spark.profile: executor asks for GPUs by itself",
            expected=f"no spark.executor.resource.{name}.amount and "
            f"no spark.task.resource.{name}.amount",
            do="They would give a GPU to every executor, those that only prepare too.",
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")

"""One DAG per surface of `surfaces.yaml`: plan, prepare, score, audit, publish, report.

Reads the YAML file and nothing else: the packages of nightshelf, torch and Spark are in other
environments, and each task starts a command there. `docs/airflow.md` is the manual.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from airflow.sdk import (
    DAG,
    Asset,
    BaseOperator,
    CronPartitionTimetable,
    DeadlineAlert,
    DeadlineReference,
    Param,
    PartitionedAssetTimetable,
    StartOfDayMapper,
    SyncCallback,
    chain,
)

_HERE = Path(__file__).resolve().parent
if str(_HERE) not in sys.path:  # Airflow adds a bundle's root only, and this may be a folder in it
    sys.path.append(str(_HERE))

from nightshelf_alerts import run_failed  # noqa: E402  # found only now
from nightshelf_steps import (  # noqa: E402  # found only now
    InputsReady,
    NightshelfOperator,
    RetryOnlyWhatHelps,
    partition_date,
)

STEPS = ("plan", "prepare", "score", "audit", "publish", "report")
_SCHEDULES = ({"cron", "timezone", "run_offset"}, {"assets", "keys"})
_ON_SPARK = ("plan", "prepare", "score")
_RUN_ID = "{{ (ti.xcom_pull(task_ids='prepare') or ti.xcom_pull(task_ids='plan')).run_id }}"
_ONE_TASK = "{{ {'score': '--set=task.generate=null', 'generate': '--set=task.score=null'}"


@dataclass(frozen=True, kw_only=True)
class Surface:
    """One entry of `surfaces.yaml` over its defaults."""

    name: str
    folder: Path  # of surfaces.yaml: relative paths start there
    config: str
    schedule: dict[str, Any] | None = None  # {cron, timezone, run_offset}, {assets, …}, or by hand
    ready: list[str] = field(default_factory=list)  # files that must be there before a run starts
    ready_timeout_hours: float = 6
    ready_every_s: float = 60
    command: list[str] = field(default_factory=lambda: ["nightshelf"])
    env: dict[str, str] = field(default_factory=dict)
    launcher: str = "local"
    spark: dict[str, Any] = field(default_factory=dict)  # arguments of SparkSubmitOperator
    spark_steps: list[str] = field(default_factory=lambda: ["score"])
    start_date: date = date(2026, 1, 1)
    max_active_runs: int = 1
    pool: str = "gpu"  # of the score task
    pool_slots: int = 1
    queue: str | None = None  # of the score task, where an executor has queues
    retries: int = 3
    retry_delay_s: float = 60
    max_retry_delay_s: float = 1800
    timeout_hours: float = 12  # of one task
    deadline_hours: float | None = None
    tags: list[str] = field(default_factory=list)

    @property
    def dag_id(self) -> str:
        """The surface's name, as far as Airflow allows it in an id."""
        return "nightshelf_" + re.sub(r"[^A-Za-z0-9_.-]", "_", self.name)

    @property
    def asset(self) -> Asset:
        """What downstream DAGs can wait for."""
        return Asset(
            name=self.dag_id,
            uri=f"nightshelf://recommendations/{quote(self.name, safe='')}",
            group="nightshelf",
        )


def read_surfaces(path: Path) -> list[Surface]:
    """The surfaces of a file.

    Raises:
        ValueError: naming the surface and the keys that are not known or missing.
    """
    raw = yaml.safe_load(path.read_text()) or {}
    return [
        _surface(name, path, (raw.get("defaults") or {}) | (own or {}))
        for name, own in (raw.get("surfaces") or {}).items()
    ]


def _surface(name: str, path: Path, settings: dict[str, Any]) -> Surface:
    known = {f.name for f in fields(Surface)} - {"name", "folder"}
    if unknown := set(settings) - known:
        raise ValueError(f"{path}: {name}: unknown {sorted(unknown)}; known are {sorted(known)}")
    if "config" not in settings:
        raise ValueError(f"{path}: {name}: config is missing")
    if "start_date" in settings:  # YAML reads a date in quotes as text
        settings = settings | {"start_date": date.fromisoformat(str(settings["start_date"]))}
    surface = Surface(name=name, folder=path.parent, **settings)
    if surface.launcher not in ("local", "spark"):
        raise ValueError(f"{path}: {name}: launcher is local or spark, not {surface.launcher!r}")
    if wrong := set(surface.spark_steps) - set(_ON_SPARK):
        raise ValueError(f"{path}: {name}: spark_steps may be {_ON_SPARK}, not {sorted(wrong)}")
    if surface.launcher == "spark" and "application" not in surface.spark:
        raise ValueError(f"{path}: {name}: spark.application is missing")
    schedule = set(surface.schedule or {})
    if schedule and not any(
        schedule <= one and schedule & {"cron", "assets"} for one in _SCHEDULES
    ):
        raise ValueError(
            f"{path}: {name}: schedule has {sorted(schedule)}; it may have cron, timezone and "
            "run_offset, or assets and keys"
        )
    return surface


def timetable(surface: Surface) -> CronPartitionTimetable | PartitionedAssetTimetable | None:
    """When runs start, and of which partition each is.

    A cron expression alone would be a run without a partition; here each tick has one, `run_offset`
    ticks away: with -1 a nightly run is of the day before.
    """
    schedule = surface.schedule or {}
    if "cron" in schedule:
        return CronPartitionTimetable(
            schedule["cron"],
            timezone=schedule.get("timezone", "UTC"),
            run_offset=schedule.get("run_offset", -1),
            key_format="%Y-%m-%d",
        )
    if "assets" in schedule:
        every = [
            Asset.ref(uri=name) if "://" in name else Asset.ref(name=name)
            for name in schedule["assets"]
        ]
        condition = every[0]
        for asset in every[1:]:
            condition = condition & asset
        kind = schedule.get("keys", "date")
        mapper = {"default_partition_mapper": StartOfDayMapper()} if kind == "timestamp" else {}
        return PartitionedAssetTimetable(assets=condition, **mapper)
    return None


def _days(surface: Surface) -> int | None:
    """Days from a daily run to its partition; None for any other schedule."""
    schedule = surface.schedule or {}
    fields_of = schedule.get("cron", "").split()
    once = all(word.isdigit() for word in fields_of[:2])
    daily = once and fields_of[2:] == ["*", "*", "*"]
    return schedule.get("run_offset", -1) if daily or schedule.get("cron") == "@daily" else None


def _params(surface: Surface) -> dict[str, Param]:
    return {
        "ds": Param(
            None,
            type=["null", "string"],
            format="date",
            title="Partition date",
            description="Empty: the date of the schedule or of the assets.",
        ),
        "surface": Param(surface.name, type="string", minLength=1, description="Surface to write."),
        "config": Param(
            os.path.normpath(surface.folder / surface.config),
            type="string",
            description="YAML file of the run, on the workers.",
        ),
        "task": Param(
            "as configured",
            enum=["as configured", "score", "generate"],
            description="Do only one of the configuration's two tasks.",
        ),
        "reprocess": Param(
            "all",
            enum=["none", "failed", "all"],
            description="Skip dates that have any run (none) or are published (failed). With all, "
            "finished shards of the same run are kept.",
        ),
    }


def _arguments(step: str) -> list[str]:
    """A step's command line after the program; what is empty is left out."""
    words = [
        step,
        "{{ params.config }}",
        "--ds={{ ds_of(params, dag_run) }}",
        "--set=surface={{ params.surface | tojson }}",
        _ONE_TASK + ".get(params.task, '') }}",
        "--output=json",
    ]
    return words if step in ("plan", "prepare") else [*words, f"--run-id={_RUN_ID}"]


def _task(surface: Surface, step: str) -> BaseOperator:
    heavy = step == "score"
    where = {"pool": surface.pool, "pool_slots": surface.pool_slots} if heavy else {}
    if heavy and surface.queue:
        where["queue"] = surface.queue
    if surface.launcher == "spark" and step in surface.spark_steps:
        from nightshelf_spark import NightshelfSparkOperator

        return NightshelfSparkOperator(
            task_id=step,
            step=step,
            name=f"nightshelf-{surface.name}-{step}",
            application_args=_arguments(step),
            options=surface.spark
            | {"application": _absolute(surface.folder, surface.spark["application"])},
            **where,
        )
    program = [_absolute(surface.folder, word) for word in surface.command]
    return NightshelfOperator(
        task_id=step,
        step=step,
        command=[*program, *_arguments(step)],
        env={name: str(value) for name, value in surface.env.items()},
        cwd=str(surface.folder),
        asset=surface.asset if step == "publish" else None,
        **where,
    )


def _absolute(folder: Path, word: str) -> str:
    """A path that starts with a dot, from the YAML file's folder."""
    return os.path.normpath(folder / word) if word.startswith(".") else word


def _deadline(surface: Surface) -> DeadlineAlert | None:
    if surface.deadline_hours is None:
        return None
    return DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=timedelta(hours=surface.deadline_hours),
        callback=SyncCallback(
            "nightshelf_alerts.run_late",
            kwargs={"surface": surface.name, "hours": surface.deadline_hours},
        ),
        name=f"published within {surface.deadline_hours:g} h",
    )


def make_dag(surface: Surface) -> DAG:
    """The DAG of one surface."""
    days = _days(surface)
    zone = (surface.schedule or {}).get("timezone", "UTC")
    with DAG(
        dag_id=surface.dag_id,
        description=f"Precompute recommendations for {surface.name}",
        doc_md=_DOC.format(name=surface.name, dag_id=surface.dag_id, config=surface.config),
        schedule=timetable(surface),
        start_date=datetime.combine(surface.start_date, datetime.min.time(), UTC),
        catchup=False,
        max_active_runs=surface.max_active_runs,
        params=_params(surface),
        tags=["nightshelf", surface.launcher, *surface.tags],
        deadline=_deadline(surface),
        user_defined_macros={
            "ds_of": partial(partition_date, days=days, timezone=zone),
        },
        default_args={
            "owner": "nightshelf",
            "retries": surface.retries,
            "retry_delay": timedelta(seconds=surface.retry_delay_s),
            "retry_exponential_backoff": 2,
            "max_retry_delay": timedelta(seconds=surface.max_retry_delay_s),
            "retry_policy": RetryOnlyWhatHelps(),
            "execution_timeout": timedelta(hours=surface.timeout_hours),
            "on_failure_callback": run_failed,
        },
    ) as dag:
        steps: list[BaseOperator] = [_task(surface, step) for step in STEPS]
        if surface.ready:
            steps.insert(0, _sensor(surface))
        chain(*steps)
    return dag


def _sensor(surface: Surface) -> InputsReady:
    date_of_run = "{{ ds_of(params, dag_run) }}"
    return InputsReady(
        task_id="inputs_ready",
        markers=[
            name.replace("{ds}", date_of_run).replace("{surface}", "{{ params.surface }}")
            for name in surface.ready
        ],
        folder=str(surface.folder),
        poke_interval=surface.ready_every_s,
        timeout=surface.ready_timeout_hours * 3600,
    )


_DOC = """
### Recommendations for `{name}`

`plan` checks the configuration `{config}` and the inputs, `prepare` cuts users into shards,
`score` runs the model (one slot of the GPU pool), `audit` compares with what was published before,
`publish` makes the partition visible in one step, `report` writes a page about the run.

**When a task is red**: its log ends with the reason. Exit 2, 3, 5 and 6 want a person; exit 4 was
tried again already and may be cleared: finished shards are kept. After a repaired input or setting,
clear from `plan` on. Nothing is published until `audit` has passed, and what was published before
stays.

**Backfill**: `airflow backfill create --dag-id {dag_id} --from-date 2026-11-01
--to-date 2026-11-28T23:59 --max-active-runs 2`.
"""


def surfaces_file() -> Path:
    """`NIGHTSHELF_SURFACES`, or `surfaces.yaml` beside this file or one folder up."""
    if named := os.environ.get("NIGHTSHELF_SURFACES"):
        return Path(named)
    beside = _HERE / "surfaces.yaml"
    return beside if beside.exists() else _HERE.parent / "surfaces.yaml"


for _one in read_surfaces(surfaces_file()):
    globals()[_one.dag_id] = make_dag(_one)

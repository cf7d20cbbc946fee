"""One DAG per surface of `surfaces.yaml`: plan, prepare, score, audit, publish, report.

Reads the YAML file and nothing else: the packages of nightshelf, torch and Spark are in other
environments, and each task starts a command there. `docs/airflow.md` is the manual.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
from nightshelf_dates import partition_date  # noqa: E402  # found only now
from nightshelf_steps import (  # noqa: E402  # found only now
    CannotRun,
    InputsReady,
    NightshelfOperator,
    RetryOnlyWhatHelps,
)
from nightshelf_surfaces import (  # noqa: E402  # found only now
    Surface,
    days_of,
    read_surfaces,
    surfaces_file,
    time_of,
)

STEPS = ("plan", "prepare", "score", "audit", "publish", "report")
_RUN_ID = "{{ (ti.xcom_pull(task_ids='prepare') or ti.xcom_pull(task_ids='plan')).run_id }}"
_ONE_TASK = "{{ {'score': '--set=task.generate=null', 'generate': '--set=task.score=null'}"
_NO_PLUGIN = (
    "The plugin nightshelf-airflow is not installed (`pip install ./airflow`, or copy "
    "airflow/plugins/ to Airflow's plugins folder): in a night without an hour, Airflow may show "
    "one partition key twice and another never, though a daily run has the right --ds."
)
_log = logging.getLogger("airflow.dag.nightshelf")


def asset_of(surface: Surface) -> Asset:
    """What downstream DAGs can wait for."""
    return Asset(
        name=surface.dag_id,
        uri=f"nightshelf://recommendations/{quote(surface.name, safe='')}",
        group="nightshelf",
    )


def timetable(surface: Surface) -> CronPartitionTimetable | PartitionedAssetTimetable | None:
    """When runs start, and of which partition each is.

    A cron expression alone would be a run without a partition; here each tick has one, `run_offset`
    ticks away: with -1 a nightly run is of the day before. Where clocks change, only the timetable
    of our plugin counts them right.
    """
    schedule = surface.schedule or {}
    if "cron" in schedule:
        return _cron_timetable()(
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


@cache
def _cron_timetable() -> type[CronPartitionTimetable]:
    """Ours, where Airflow knows it; else Airflow's own.

    A module of that name is not enough: Airflow takes timetables of plugins only, and would refuse
    the DAG.
    """
    try:
        from airflow.plugins_manager import get_timetables_plugins
    except ImportError:  # a worker with the Task SDK alone, which schedules nothing
        return CronPartitionTimetable
    return get_timetables_plugins().get(
        "nightshelf_timetable.WallClockTimetable", CronPartitionTimetable
    )


def _without_plugin(schedule: Mapping[str, Any]) -> str:
    """The sentence about keys that will be wrong, where they can be; else nothing."""
    clock_changes = "cron" in schedule and schedule.get("timezone", "UTC") != "UTC"
    if not clock_changes or _cron_timetable() is not CronPartitionTimetable:
        return ""
    _warn_once()
    return _NO_PLUGIN


@cache
def _warn_once() -> None:
    _log.warning("%s", _NO_PLUGIN)


def _config_of(surface: Surface) -> str:
    return os.path.normpath(surface.folder / surface.config)


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
            _config_of(surface),
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
        asset=asset_of(surface) if step == "publish" else None,
        announces={"surface": surface.name, "config": _config_of(surface)},
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
    schedule = surface.schedule or {}
    when = {
        "days": days_of(schedule),
        "timezone": schedule.get("timezone", "UTC"),
        "at": time_of(schedule),
    }
    doc = _DOC.format(name=surface.name, dag_id=surface.dag_id, config=surface.config)
    with DAG(
        dag_id=surface.dag_id,
        description=f"Precompute recommendations for {surface.name}",
        doc_md="\n".join([doc, _without_plugin(schedule)]).rstrip(),
        schedule=timetable(surface),
        start_date=datetime.combine(surface.start_date, datetime.min.time(), UTC),
        catchup=False,
        max_active_runs=surface.max_active_runs,
        params=_params(surface),
        tags=["nightshelf", surface.launcher, *surface.tags],
        auto_register=False,  # what is below counts: half a DAG does not
        deadline=_deadline(surface),
        user_defined_macros={"ds_of": partial(partition_date, **when)},
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


def broken_dag(surface: Surface, why: Exception) -> DAG:
    """In the place of a DAG that Airflow or a provider does not accept: it fails and says why."""
    text = f"{surface.name}: {type(why).__name__}: {why}"
    with DAG(
        dag_id=surface.dag_id,
        description=f"Cannot be made: {text}"[:500],
        doc_md=f"### `{surface.name}` cannot be made\n\n{text}",
        schedule=None,
        tags=["nightshelf", "broken"],
        auto_register=False,
    ) as dag:
        CannotRun(task_id="plan", why=text, retries=0, on_failure_callback=run_failed)
    return dag


def make_dags(path: Path) -> dict[str, DAG]:
    """One DAG for each surface that is right; of the others `nightshelf_problems` tells."""
    found = {}
    for surface in read_surfaces(path):
        try:
            found[surface.dag_id] = make_dag(surface)
        except Exception as err:  # of one surface: an argument that an operator does not know
            _log.error("%s cannot be made: %s", surface.dag_id, err)
            found[surface.dag_id] = broken_dag(surface, err)
    return found


globals().update(make_dags(surfaces_file()))

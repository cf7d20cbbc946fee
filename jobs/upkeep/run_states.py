"""How far runs are, and which of them readers see. Reads files only."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.running.run_folder import load_plan, manifest_path
from pipelines.inputs.prepared import shards_of
from pipelines.publish import open_table
from pipelines.shards.profile import published_marker, table_key
from pipelines.shards.run_shard import load_receipt
from pipelines.storage import files
from pipelines.storage.records import read_record
from schemas.counts import Counts
from schemas.errors import ConfigError, StorageError
from schemas.markers import ManifestHead
from schemas.runs import RunPlan, working_seconds
from schemas.settings import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """How far a run is."""

    run_id: str
    # planned, scoring, scored, published, replaced, withdrawn, failed, refused, unreadable
    status: str
    run_dir: str
    table: str = ""  # which it publishes to
    ds: str = ""
    surface: str = ""
    shards_done: int = 0
    shards: int = 0
    counts: Counts = Counts()
    seconds: float | None = None
    serves: tuple[str, ...] = ()  # other dates whose readers see its rows


class Serving:
    """Which run readers see, by date, as the tables say; each surface of a table is asked once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], dict[str, str]] = {}

    def dates(self, plan: RunPlan) -> dict[str, str]:
        """The run that is published for each date of the plan's table and surface."""
        key = (table_key(plan.config), plan.surface)
        if key not in self._found:
            self._found[key] = dict(open_table(plan.config, ds=plan.ds).dates())
        return self._found[key]


def run_status(run_dir: str, serving: Serving | None = None) -> RunStatus:
    """The status of one run folder."""
    plan = load_plan(run_dir)
    was_published = files.exists(published_marker(run_dir))
    try:
        dates = (serving or Serving()).dates(plan)
    except (StorageError, ConfigError):
        if was_published:
            raise
        dates = {}  # a table that is not to be had says nothing of what never reached it
    found = (load_receipt(plan, shard, prove=False) for shard in shards_of(plan))
    receipts = [receipt for receipt in found if receipt is not None]
    state, seconds = "planned", working_seconds(receipts) if receipts else None
    if receipts:
        state = "scored" if len(receipts) == plan.num_shards else "scoring"
    if files.exists(manifest_path(run_dir)):
        state = read_record(ManifestHead, manifest_path(run_dir)).status
    if dates.get(plan.ds) == plan.run_id:
        state = "published"
    elif was_published:  # whatever was tried with it since
        withdrawn = open_table(plan.config, ds=plan.ds).is_withdrawn(plan.run_id)
        state = "withdrawn" if withdrawn else "replaced"
    return RunStatus(
        run_id=plan.run_id,
        status=state,
        table=table_key(plan.config),
        ds=plan.ds,
        surface=plan.surface,
        shards_done=len(receipts),
        shards=plan.num_shards,
        counts=Counts.total(receipt.counts for receipt in receipts),
        seconds=seconds,
        run_dir=run_dir,
        serves=tuple(sorted(d for d, run in dates.items() if run == plan.run_id and d != plan.ds)),
    )


def all_runs(work_dir: str, ds: str = "") -> list[RunStatus]:
    """Status of every run below a work folder, or of one date's, newest date last."""
    root = files.local_path(work_dir) or work_dir
    fs, inside = files.filesystem(root)
    fs.invalidate_cache()
    if not fs.isdir(inside):
        return []
    named = (p for p in fs.ls(inside, detail=False) if p.rpartition("/")[2].startswith(ds))
    folders = sorted(p for p in named if fs.exists(f"{p}/plan.json"))  # a run's id begins with ds
    if "://" in root:
        folders = [str(fs.unstrip_protocol(folder)) for folder in folders]
    serving = Serving()
    return [_status_or_unreadable(folder, serving) for folder in folders]


def _status_or_unreadable(run_dir: str, serving: Serving) -> RunStatus:
    """One folder that cannot be read hides no other."""
    try:
        return run_status(run_dir, serving)
    except (StorageError, ConfigError):
        run_id = run_dir.rpartition("/")[2]
        return RunStatus(run_id=run_id, status="unreadable", run_dir=run_dir)


def published_plan(config: RunConfig) -> RunPlan:
    """The plan of the run that readers see."""
    published = open_table(config).current()
    if published is None:
        raise StorageError(
            "nothing is published",
            got=f"ds {config.ds}, surface {config.surface!r}",
            where=config.output.path,
            do="Run it first: nightshelf run CONFIG.",
        )
    return load_plan(files.join(config.run.work_dir, published.run_id))

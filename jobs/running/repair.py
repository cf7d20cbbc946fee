"""Launch shards, and write again what they found damaged: everything derived can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.catalog.build import is_saved
from pipelines.catalog.items import catalog_dir
from pipelines.inputs.prepared import forget_prepared, is_intact
from pipelines.shards.run_shard import load_receipt
from schemas.errors import DamagedFileError
from schemas.runs import RunPlan, Shard

if TYPE_CHECKING:
    from jobs.running.launcher import Launcher, Progress


def launch_and_repair(
    plan: RunPlan, launcher: Launcher, todo: list[Shard], progress: Progress
) -> dict[int, str]:
    """Launch shards. Where what they read is not what prepare wrote (a disk that lost bits, a crash
    that cut files short), it is written again and its shards are launched once more.
    """
    damage: DamagedFileError | None = None
    try:
        failed = launcher.launch(plan, todo, progress)
    except DamagedFileError as err:
        damage = err
        failed = {s.index: str(err) for s in todo if load_receipt(plan, s) is None}
    items = "catalog" not in plan.inputs or not failed or is_saved(catalog_dir(plan))
    broken = [s for s in todo if s.index in failed and not (items and is_intact(plan, s))]
    if not broken:
        if damage is not None:
            raise damage
        return failed
    progress.note(f"what {len(broken)} shards read was damaged: it is prepared again")
    forget_prepared(plan)
    launcher.prepare(plan, progress)
    again = {s.index for s in broken}
    kept = {index: why for index, why in failed.items() if index not in again}
    return kept | launcher.launch(plan, broken, progress)

"""gc takes what nobody needs: every command still finds what it reads, whenever gc is cut off."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.upkeep import gc
from pipelines.storage import files
from tests.factories import write_config, write_inputs
from tests.publish.runs import FORMATS

ALL = ("--keep-days", "0", "--output", "json")


@pytest.fixture(params=FORMATS)
def nights(request, nightshelf, tmp_path):
    """Three dates, the last one run twice; the configuration and the run ids by date."""
    write_inputs(tmp_path)
    config = write_config(tmp_path, output__format=request.param)
    runs: dict[str, list[str]] = {}
    for ds, k in (("2026-11-26", 5), ("2026-11-27", 5), ("2026-11-28", 5), ("2026-11-28", 4)):
        changed = ("--set", f"task.k={k}", "--output", "json")
        done = nightshelf("run", config, "--ds", ds, *changed).json
        runs.setdefault(ds, []).append(done["run_id"])
    return config, runs


def truth(folder: Path) -> Path:
    pq.write_table(pa.table({"user_id": ["u001", "u002"], "item_id": ["i001", "i002"]}),
                   folder / "truth.parquet")  # fmt: skip
    return folder / "truth.parquet"


def read_all(nightshelf, config, folder, name):
    """What every command that looks back says of the last date."""
    day = ("--ds", "2026-11-28")
    k = ("--set", "task.k=4")
    nightshelf("export", config, *day, *k, "--to", folder / f"export-{name}")
    exported = sorted(p.read_bytes() for p in (folder / f"export-{name}").glob("*.jsonl"))
    said = [
        nightshelf("evaluate", config, *day, *k, "--truth", truth(folder), "--output", "json").json,
        nightshelf("audit", config, *day, *k, "--published", "--output", "json").json,
        nightshelf("show", config, *day, *k, "--user", "u003", "--output", "json").json,
        nightshelf("report", config, *day, *k, "--user", "u003", "--output", "json").json,
    ]
    runs = folder / "runs"
    two = sorted(run for run in runs.glob("2026-11-2[78]-*"))[:2]
    said.append(nightshelf("compare", *two, "--output", "json").json)
    for one in said:  # when, and how long it took
        for timing in ("seconds", "started_at", "finished_at", "written_at"):
            one.pop(timing, None)
    return exported, said


def test_what_looks_back_reads_the_same_after_gc(nightshelf, tmp_path, nights):
    config, runs = nights
    before = read_all(nightshelf, config, tmp_path, "before")
    removed = nightshelf("gc", config, *ALL).json["removed"]
    assert len(removed) == 4
    assert read_all(nightshelf, config, tmp_path, "after") == before
    back = nightshelf("rollback", config, "--ds", "2026-11-28", "--output", "json").json
    assert back["run_id"] == runs["2026-11-28"][0]
    nightshelf("gc", config, *ALL)
    assert nightshelf("gc", config, *ALL).json["removed"] == [], "nothing is left to take"


def test_a_run_that_is_behind_what_is_kept_loses_its_rows_alone(nightshelf, tmp_path, nights):
    config, runs = nights
    nightshelf("gc", config, *ALL, "--keep", "0")
    first, second = (tmp_path / "runs" / run for run in runs["2026-11-28"])
    assert not (first / "staged").exists()
    assert (second / "staged").exists()
    assert (first / "manifest.json").exists()
    for one in runs["2026-11-26"] + runs["2026-11-27"]:
        assert (tmp_path / "runs" / one / "staged").exists(), "readers see it"
    done = nightshelf("rollback", config, "--ds", "2026-11-28", check=None)
    if "format: parquet" in config.read_text():  # a lake has the rows itself
        assert done.code == 4
        assert "staged" in done.err
    else:
        assert first.name in done.out


def test_a_run_that_began_after_the_first_look_is_left_alone(
    nightshelf, tmp_path, nights, monkeypatch
):
    """The folder was idle when it was looked at, and is not once the lock is held."""
    config, runs = nights
    folder = tmp_path / "runs" / runs["2026-11-27"][0]
    real = gc.only_run_of

    def meanwhile(plan):
        if plan.run_id == folder.name:
            (folder / "shards" / "another.parquet").write_bytes(b"written just now")
        return real(plan)

    monkeypatch.setattr(gc, "only_run_of", meanwhile)
    monkeypatch.setattr(gc, "_days_idle", idle_of(gc._days_idle))
    found = nightshelf("gc", config, "--keep-days", "1", "--output", "json").json["removed"]
    assert folder.name not in {one["run_id"] for one in found}
    assert (folder / "shards" / "another.parquet").exists()
    assert len(found) == 3


def idle_of(real):
    """As if what was written by the nights was old, and what came since is not."""

    def days(run_dir):
        return real(run_dir) if "another" in str(files.find(run_dir)) else 30.0

    return days


def test_a_run_that_holds_its_lock_loses_nothing(nightshelf, tmp_path, nights):
    from jobs.running.run_folder import load_plan
    from jobs.running.run_lock import only_run_of

    config, runs = nights
    folder = tmp_path / "runs" / runs["2026-11-27"][0]
    with only_run_of(load_plan(str(folder))):
        found = nightshelf("gc", config, *ALL).json["removed"]
        assert folder.name not in {one["run_id"] for one in found}
        assert (folder / "shards").exists()
    assert folder.name in {one["run_id"] for one in nightshelf("gc", config, *ALL).json["removed"]}


@pytest.mark.parametrize("removals", [0, 1, 3, 6])
def test_gc_that_is_cut_off_is_finished_by_the_next(
    nightshelf, tmp_path, nights, monkeypatch, removals
):
    config, _ = nights
    before = read_all(nightshelf, config, tmp_path, "before")
    real, left = files.remove_folder, [removals]

    def cut_off(path):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        real(path)

    monkeypatch.setattr(files, "remove_folder", cut_off)
    assert nightshelf("gc", config, *ALL, check=None).code == 130
    monkeypatch.setattr(files, "remove_folder", real)
    nightshelf("gc", config, *ALL)
    assert not list((tmp_path / "runs").glob("2026-*/shards"))
    assert read_all(nightshelf, config, tmp_path, "after") == before

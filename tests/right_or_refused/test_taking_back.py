"""One record of what is published: the table. Bad rows can be taken back and stay so, damage is
noticed and repaired, and what a daily schedule leaves behind goes.
"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from deltalake import DeltaTable

from jobs.upkeep.gc import clean_up
from pipelines.publish import open_table, publish_run
from pipelines.publish.rollback import rollback, serve_from, unpublish
from pipelines.storage import files
from schemas.errors import ConfigError, StorageError, WithdrawnError
from tests.factories import write_config, write_inputs
from tests.publish.runs import FORMATS, config_of, expected, publish, read, staged_run


@pytest.fixture(params=FORMATS)
def table_format(request):
    return request.param


def data_files(published):
    """Paths of the files that readers read."""
    root = Path(published.partition if published.format == "parquet" else published.table)
    return [Path(f.removeprefix("file://")) if "://" in f else root / f for f in published.files]


# -- what readers see ----------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["bit", "cut", "lost"])
def test_damage_of_a_published_file_is_noticed_and_repaired(table_format, tmp_path, damage):
    config = config_of(tmp_path, table_format)
    run = staged_run(config, "a")
    publish_run(*run)
    assert open_table(config).verify() == 3
    for number in range(3):
        path = data_files(open_table(config).current())[number]
        data = path.read_bytes()
        at = len(data) * (number + 1) // 5
        if damage == "bit":
            path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        elif damage == "cut":
            path.write_bytes(data[:at])
        else:
            path.unlink()
        with pytest.raises(StorageError, match="damaged|missing"):
            open_table(config).verify()
        with pytest.raises(StorageError):
            list(open_table(config).parts())
        publish_run(*run)
        assert open_table(config).verify() == 3
        assert read(config).equals(expected(run))


@pytest.mark.parametrize("change", ["restore", "update", "delete", "overwrite"])
def test_a_delta_table_that_somebody_changed_is_published_again(tmp_path, change):
    config = config_of(tmp_path, "delta")
    a, b = staged_run(config, "a"), staged_run(config, "b")
    publish_run(*a)
    version = DeltaTable(tmp_path / "out").version()
    publish_run(*b)
    table = DeltaTable(tmp_path / "out")
    if change == "restore":
        table.restore(version)
        assert open_table(config).current().run_id == a[0].run_id
    elif change == "update":
        table.update(predicate="user_id = '003'", updates={"score": "-1.0"})
    elif change == "delete":
        table.delete("rank = 2")
    else:
        from deltalake import write_deltalake

        write_deltalake(table, table.to_pyarrow_table().slice(0), mode="overwrite")
    publish_run(*b)
    assert read(config).equals(expected(b))
    assert open_table(config).verify() == 3


def test_an_iceberg_partition_that_somebody_overwrote_is_published_again(tmp_path):
    from pyiceberg.catalog import load_catalog

    config = config_of(tmp_path, "iceberg")
    run = staged_run(config, "a")
    publish_run(*run)
    root = tmp_path / "out"
    catalog = load_catalog(
        "nightshelf", type="sql", uri=f"sqlite:///{root}/catalog.db", warehouse=f"file://{root}"
    )
    table = catalog.load_table("nightshelf.recommendations")
    rows = table.scan().to_arrow()
    scores = pl.from_arrow(rows).with_columns(pl.lit(-9.0, pl.Float32).alias("score")).to_arrow()
    table.overwrite(scores.cast(rows.schema))
    catalog.close()
    assert open_table(config).current().rows == 36, "as many as before"
    publish_run(*run)
    assert read(config).equals(expected(run))


# -- taking back ---------------------------------------------------------------------------------


def test_what_is_unpublished_is_not_read_and_not_published_by_itself(table_format, tmp_path):
    config, other = (
        config_of(tmp_path, table_format),
        config_of(tmp_path, table_format, surface="x"),
    )
    run, beside = staged_run(config, "a"), staged_run(other, "b")
    publish_run(*run)
    publish_run(*beside)
    assert unpublish(config).run_id == run[0].run_id
    assert unpublish(config) is None, "there is nothing left"
    assert open_table(config).current() is None
    assert dict(open_table(config).dates()) == {}
    with pytest.raises(StorageError, match="nothing is published"):
        open_table(config).read()
    if table_format == "parquet":
        assert not list((tmp_path / "out").rglob("surface=home/*"))
    for _ in range(2):
        with pytest.raises(WithdrawnError, match="taken back.*--republish"):
            publish_run(*run)
    publish_run(*run, republish=True)
    publish_run(*run)
    assert read(config).equals(expected(run))
    assert read(other).equals(expected(beside))


def test_a_rolled_back_run_stays_so_and_another_may_come(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    a, b, c = (staged_run(config, name) for name in "abc")
    publish_run(*a)
    publish_run(*b)
    rollback(config)
    with pytest.raises(WithdrawnError):
        publish_run(*b)
    publish_run(*a)
    publish_run(*c)
    with pytest.raises(WithdrawnError):
        publish_run(*b)
    assert read(config).equals(expected(c))
    rollback(config, b[0].run_id)
    publish_run(*b)
    with pytest.raises(WithdrawnError):
        publish_run(*c)


def test_after_unpublish_the_run_before_comes_back(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    a, b = staged_run(config, "a"), staged_run(config, "b")
    publish_run(*a)
    publish_run(*b)
    unpublish(config)
    assert rollback(config).run_id == a[0].run_id
    assert read(config).equals(expected(a))


@pytest.mark.parametrize("users", [12, 0])
def test_a_date_serves_the_rows_of_another(table_format, tmp_path, users):
    before, config = (config_of(tmp_path, table_format, ds=f"2026-11-{d}") for d in (27, 28))
    good, bad = staged_run(before, "good", users=users), staged_run(config, "bad")
    publish_run(*good)
    publish_run(*bad)
    served = serve_from(config, "2026-11-27")
    assert served.run_id == good[0].run_id
    for one in (config, before):
        assert read(one).equals(expected(good))
        if users:
            assert open_table(one).verify() == 3
    if table_format != "parquet" and users:
        rows = pl.from_arrow(open_table(config).read())
        assert rows["ds"].unique().to_list() == ["2026-11-28"]
    with pytest.raises(WithdrawnError):
        publish_run(*bad)
    new = staged_run(config, "new")
    publish_run(*new)
    assert read(config).equals(expected(new))
    assert read(before).equals(expected(good))


def test_there_must_be_rows_to_serve_from(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    run = staged_run(config, "a")
    publish_run(*run)
    for ds in ("2026-11-27", "2026-11-28"):
        with pytest.raises(ConfigError, match="no rows to serve from"):
            serve_from(config, ds)
    assert read(config).equals(expected(run))


def test_rows_without_users_are_never_copied(tmp_path):
    """Rows that a reader could not make sense of had the right count."""
    import pyarrow as pa

    from pipelines.publish.lake_files import check_rows

    good = pa.table({"user_id": ["a", "b"], "run_id": ["r", "r"]})
    check_rows(good, "r", "here")
    for bad in (
        pa.table({"user_id": ["a", None], "run_id": ["r", "r"]}),
        pa.table({"user_id": ["a", "b"], "run_id": ["r", "s"]}),
        pa.table({"user_id": ["a", "b"], "run_id": pa.array([None, None], pa.string())}),
    ):
        with pytest.raises(StorageError, match="not those of the run"):
            check_rows(bad, "r", "here")


def test_rollback_finds_a_run_that_the_table_has_forgotten(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, output__format="iceberg")
    first = nightshelf("run", config, "--output", "json").json
    second = nightshelf("run", config, "--set", "task.k=3", "--output", "json").json
    from pyiceberg.catalog import load_catalog

    root = tmp_path / "out"
    catalog = load_catalog(
        "nightshelf", type="sql", uri=f"sqlite:///{root}/catalog.db", warehouse=f"file://{root}"
    )
    table = catalog.load_table("nightshelf.recommendations")
    kept = table.current_snapshot().snapshot_id
    old = [s.snapshot_id for s in table.snapshots() if s.snapshot_id != kept]
    table.maintenance.expire_snapshots().by_ids(old).commit()
    catalog.close()
    shown = nightshelf("status", config, "--output", "json").json["runs"]
    assert {r["run_id"]: r["status"] for r in shown}[second["run_id"]] == "published"
    done = nightshelf("rollback", config, "--output", "json").json
    assert done["run_id"] == first["run_id"]


# -- the commands --------------------------------------------------------------------------------


def test_the_commands_of_taking_back(nightshelf, tmp_path, table_format):
    write_inputs(tmp_path)
    config = write_config(tmp_path, output__format=table_format)
    day = ("--ds", "2026-11-28", "--output", "json")
    good = nightshelf("run", config, "--ds", "2026-11-27", "--output", "json").json
    bad = nightshelf("run", config, *day).json
    checked = nightshelf("audit", config, *day, "--published").json
    assert (checked["status"], checked["run_id"]) == ("verified", bad["run_id"])
    taken = nightshelf("unpublish", config, *day).json
    assert taken == {
        "status": "unpublished", "ds": "2026-11-28", "surface": "home", "withdrawn": bad["run_id"],
    }  # fmt: skip
    again = nightshelf("run", config, *day, check=6)
    assert json.loads(again.out.splitlines()[-1])["error"]["kind"] == "withdrawn"
    nightshelf("publish", config, "--run-id", bad["run_id"], check=6)
    served = nightshelf("rollback", config, *day, "--serve-from", "2026-11-27").json
    assert served["run_id"] == good["run_id"]
    runs = {r["run_id"]: r for r in nightshelf("status", config, "--output", "json").json["runs"]}
    assert runs[bad["run_id"]]["status"] == "withdrawn"
    assert runs[good["run_id"]]["serves"] == ["2026-11-28"]
    shown = nightshelf("show", config, "--ds", "2026-11-28", "--user", "u003", "--output", "json")
    assert shown.json["run_id"] == good["run_id"]
    nightshelf("run", config, *day, "--republish")
    runs = {r["run_id"]: r for r in nightshelf("status", config, "--output", "json").json["runs"]}
    assert runs[bad["run_id"]]["status"] == "published"
    assert runs[good["run_id"]]["serves"] == []


def test_status_never_cuts_a_run_id(nightshelf, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    run_id = nightshelf("run", config, "--output", "json").json["run_id"]
    assert run_id in nightshelf("status", config).out


def test_show_of_a_user_that_nobody_knows_is_an_error(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    done = nightshelf("show", config, "--user", "nobody", check=3)
    assert "not in the users table" in done.err


def test_the_audit_compares_with_what_readers_see(nightshelf, tmp_path, table_format):
    """Not with a run that was rolled back."""
    write_inputs(tmp_path)
    config = write_config(tmp_path, output__format=table_format)
    first = nightshelf("run", config, "--output", "json").json
    second = nightshelf("run", config, "--set", "task.k=3", "--output", "json").json

    def baseline():
        path = next((tmp_path / "runs").glob("2026-11-29-*/audit.json"))
        gates = json.loads(path.read_text())["gates"]
        return {gate["against"] for gate in gates if gate["gate"] == "overlap"}

    nightshelf("run", config, "--ds", "2026-11-29")
    assert baseline() == {second["run_id"]}
    nightshelf("unpublish", config, "--ds", "2026-11-29")
    nightshelf("rollback", config)
    run_id = next((tmp_path / "runs").glob("2026-11-29-*")).name
    nightshelf("audit", config, "--run-id", run_id)
    assert baseline() == {first["run_id"]}


# -- upkeep --------------------------------------------------------------------------------------


def test_ten_nights_leave_their_derived_files_to_gc_and_can_be_rolled_back(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    days = [f"2026-11-{day}" for day in range(10, 20)]
    for day in days:
        nightshelf("run", config, "--ds", day)
    replaced = nightshelf("run", config, "--ds", days[0], "--set", "task.k=3", "--output", "json")
    runs = tmp_path / "runs"
    derived = ("shards", "catalog")
    there = [run for run in runs.glob("2026-*") if (run / "shards").exists()]
    assert len(there) == 11
    dry = nightshelf("gc", config, "--keep-days", "0", "--dry-run", "--output", "json").json
    assert len(dry["removed"]) == 11
    assert all(one["bytes"] > 0 for one in dry["removed"])
    assert nightshelf("gc", config, "--output", "json").json["removed"] == [], "younger than a week"
    gone = nightshelf("gc", config, "--keep-days", "0", "--output", "json").json
    assert gone["removed"] == dry["removed"]
    assert not [run for run in there for name in derived if (run / name).exists()]
    assert all((run / "staged").exists() for run in there)
    back = nightshelf("rollback", config, "--ds", days[0], "--output", "json").json
    assert back["run_id"] != replaced.json["run_id"]
    nightshelf("show", config, "--ds", days[0], "--user", "u003")
    nightshelf("run", config, "--ds", days[5])


def test_gc_asks_the_table_which_runs_readers_see(tmp_path, table_format):
    """Markers say what was published once; after a rollback they name another run."""
    config = config_of(tmp_path, table_format)
    named = [staged_run(config, name) for name in "abc"]
    for number, run in enumerate(named):
        publish_run(*run)
        files.write_json(
            f"{run[0].run_dir}/published.json",
            {
                "ds": config.ds, "surface": "home", "published_at": float(number),
                "table": f"{table_format} {config.output.path} {config.output.table_name}",
                "task": "score full_vocab",
            },
        )  # fmt: skip
    rollback(config, named[0][0].run_id)
    removed = clean_up(config.run.work_dir, keep=0, older_than_days=0, dry_run=False)
    assert {one.run_id for one in removed} == {named[1][0].run_id, named[2][0].run_id}
    assert (Path(named[0][0].run_dir) / "staged").exists()


# -- hundreds of nights --------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["iceberg", "delta"])
def test_publishing_stays_flat(tmp_path, format):
    """What a publish adds to a table's metadata after 30 nights is what it added after ten."""
    sizes, manifests = [], []
    for night in range(30):
        config = config_of(tmp_path, format, ds=f"2026-{10 + night // 28}-{night % 28 + 1:02d}")
        publish(config, "a", users=4, k=2, shards=2)
        if format == "iceberg":
            folder = tmp_path / "out" / "nightshelf" / "recommendations" / "metadata"
            newest = max(folder.glob("*.metadata.json"))
            sizes.append(newest.stat().st_size)
            with _iceberg(tmp_path) as table:
                manifests.append(len(table.current_snapshot().manifests(table.io)))
        else:
            newest = max((tmp_path / "out" / "_delta_log").glob("*.json"))
            sizes.append(newest.stat().st_size)
    if format == "iceberg":
        assert max(manifests) <= 21, manifests
        assert manifests[-1] < 21
        assert len(list(folder.glob("*.metadata.json"))) <= 12
        steps = [after - before for before, after in zip(sizes, sizes[1:], strict=False)]
        assert max(steps[12:]) <= max(steps[:12]) * 1.5 + 600
    else:
        assert max(sizes[5:]) <= max(sizes[:5]) * 1.2
        assert list((tmp_path / "out" / "_delta_log").glob("*.checkpoint.parquet"))


class _iceberg:
    def __init__(self, tmp_path):
        from pyiceberg.catalog import load_catalog

        root = tmp_path / "out"
        self.catalog = load_catalog(
            "nightshelf", type="sql", uri=f"sqlite:///{root}/catalog.db", warehouse=f"file://{root}"
        )

    def __enter__(self):
        return self.catalog.load_table("nightshelf.recommendations")

    def __exit__(self, *_):
        self.catalog.close()


def test_history_is_not_walked_to_publish(tmp_path, monkeypatch):
    """A publish of a new date looks at the live files only."""
    publish(config_of(tmp_path, "delta", ds="2026-11-27"), "a")
    walked = []
    monkeypatch.setattr(DeltaTable, "history", lambda *a, **k: walked.append(a) or [])
    config = config_of(tmp_path, "delta")
    run = staged_run(config, "b")
    publish_run(*run)
    assert read(config).equals(expected(run))
    assert len(walked) <= 1, "once, for what the command says"


def test_a_locked_catalog_is_said_and_waited_for_a_while(tmp_path, monkeypatch, caplog):
    import sqlite3

    from pipelines.publish import iceberg_catalog

    monkeypatch.setattr(iceberg_catalog, "_LOCK_S", 0)
    for function in (iceberg_catalog.open_catalog, iceberg_catalog.table_for):
        monkeypatch.setattr(function.retry, "stop", lambda state: state.attempt_number >= 2)
        monkeypatch.setattr(function.retry, "wait", lambda state: 0)
    config = config_of(tmp_path, "iceberg")
    publish(config, "a")
    db = sqlite3.connect(tmp_path / "out" / "catalog.db")
    db.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(StorageError, match="could not be used.*locked"):
            publish(config, "b")
    finally:
        db.close()
    assert "the table's catalog is busy, trying again" in caplog.text
    assert iceberg_catalog._WAIT_S <= 30

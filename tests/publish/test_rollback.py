"""Going back to an older run."""

from __future__ import annotations

import shutil

import pytest
from polars.testing import assert_frame_equal

from pipelines.publish import open_table, publish_run
from pipelines.publish.rollback import rollback
from pipelines.storage import files
from schemas.errors import ConfigError, StorageError
from tests.publish.runs import config_of, expected, publish, read, staged_run


def test_back_to_the_run_before_and_forth(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    a, b = staged_run(config, "a"), staged_run(config, "b", users=5)
    publish_run(*a)
    publish_run(*b)
    assert rollback(config).run_id == a[0].run_id
    assert_frame_equal(read(config), expected(a))
    assert rollback(config).run_id == b[0].run_id
    assert_frame_equal(read(config), expected(b))


def test_to_a_run_by_its_name(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    runs = [staged_run(config, name) for name in "abc"]
    for run in runs:
        publish_run(*run)
    assert rollback(config, runs[0][0].run_id).rows == 36
    assert_frame_equal(read(config), expected(runs[0]))
    current = rollback(config, runs[0][0].run_id)
    assert current.run_id == runs[0][0].run_id, "that is current already"
    with pytest.raises(ConfigError, match=r"never published here: expected a run of ds .*-home-c"):
        rollback(config, "2026-11-28-home-x")


def test_to_an_empty_run(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    publish(config, "none", users=0)
    publish(config, "a")
    assert rollback(config).rows == 0
    assert len(read(config)) == 0


def test_there_is_nothing_to_go_back_to(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    with pytest.raises(ConfigError, match="no earlier run"):
        rollback(config)
    publish(config, "a")
    with pytest.raises(ConfigError, match="no earlier run"):
        rollback(config)


@pytest.mark.parametrize("lost", ["folder", "staged file", "changed file"])
def test_files_that_are_gone(table_format, tmp_path, lost):
    """A Parquet table has only the staged files; the others keep the rows themselves."""
    config = config_of(tmp_path, table_format)
    a, b = staged_run(config, "a"), staged_run(config, "b")
    publish_run(*a)
    publish_run(*b)
    want = expected(a)
    plan, receipts = a
    if lost == "folder":
        shutil.rmtree(plan.run_dir)
    elif lost == "staged file":
        files.remove(f"{plan.run_dir}/{receipts[1].result.path}")
    else:
        files.write_bytes(f"{plan.run_dir}/{receipts[1].result.path}", b"PAR1 other")
    if table_format == "parquet":
        with pytest.raises(StorageError, match="cannot be published again"):
            rollback(config)
        want = expected(b)
    else:
        assert rollback(config).run_id == plan.run_id
    assert_frame_equal(read(config), want)


def test_rows_that_left_the_table_come_from_staged_files(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    a = staged_run(config, "a")
    published = publish_run(*a)
    publish(config, "b")
    for name in published.files:
        if table_format == "iceberg":
            files.remove(name)
        elif table_format == "delta":
            (tmp_path / "out" / name).unlink()
    assert rollback(config).run_id == a[0].run_id
    assert_frame_equal(read(config), expected(a))


def test_the_layout_is_the_one_of_the_table_now(tmp_path):
    config = config_of(tmp_path, "parquet")
    wide = config_of(tmp_path, "parquet", output={"layout": "wide"})
    publish(config, "a")
    publish(wide, "b")
    assert rollback(wide).rows == 12
    assert "items" in read(wide).columns


def test_the_log_of_a_delta_table_is_read_in_steps_and_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.publish.delta_partition._COMMITS", (2, 3, None))
    config = config_of(tmp_path, "delta")
    for name in "abcdef":
        publish(config, name)
    runs = [one.run_id.rpartition("-")[2] for one in open_table(config).history()]
    assert runs == list("fedcba")


def test_a_publish_copies_the_snapshots_of_an_iceberg_table_a_few_times(tmp_path, monkeypatch):
    """However often the library looks at its metadata: a table has a snapshot for each night."""
    from pipelines.publish import iceberg_commit

    config = config_of(tmp_path, "iceberg")
    publish(config, "a")
    made, plain = [], iceberg_commit.update_table_metadata

    def counted(*given):
        made.append(given)
        return plain(*given)

    monkeypatch.setattr(iceberg_commit, "update_table_metadata", counted)
    monkeypatch.setattr("pyiceberg.table.update_table_metadata", counted)
    publish(config, "b")
    assert 0 < len(made) <= 4, "one for each change"
    assert [one.run_id.rpartition("-")[2] for one in open_table(config).history()] == ["b", "a"]

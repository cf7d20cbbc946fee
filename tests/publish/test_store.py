"""Publishing to an S3 store, tried against a server of that protocol on loopback."""

from __future__ import annotations

import pytest
from polars.testing import assert_frame_equal

from pipelines.publish import open_table, publish_run
from pipelines.publish.rollback import rollback
from schemas.errors import ConflictError
from tests.publish.runs import (
    config_of,
    expected,
    publish,
    publish_elsewhere,
    publish_while,
    read,
    staged_run,
)
from tests.s3 import environment, s3_server

pytest.importorskip("moto.server", reason="moto is not installed")
s3fs = pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def server():
    with s3_server() as url:
        yield url


@pytest.fixture
def config(server, tmp_path, monkeypatch, table_format):
    """An output in a bucket; credentials and endpoint are in the environment only."""
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(f"bucket-{table_format}")
    output = {"path": f"s3://bucket-{table_format}/{tmp_path.name}"}
    if table_format == "iceberg":
        output["catalog"] = {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "s3.endpoint": server,
            "s3.region": "us-east-1",
        }
    yield config_of(tmp_path, table_format, output=output)
    s3fs.S3FileSystem().rm(f"bucket-{table_format}", recursive=True)


def test_a_table_in_a_bucket(config):
    open_table(config).check(config)
    first, second = staged_run(config, "a"), staged_run(config, "b")
    for run in (first, second):
        publish_run(*run)
        assert publish_run(*run).run_id == run[0].run_id
        assert_frame_equal(read(config), expected(run))
    assert publish(config, "none", users=0).rows == 0
    assert len(read(config)) == 0
    assert rollback(config).run_id == second[0].run_id
    assert_frame_equal(read(config), expected(second))
    with pytest.raises(ConflictError):
        publish_while(staged_run(config, "late"), first)
    assert_frame_equal(read(config), expected(first))


def test_processes_at_once_in_a_bucket(config):
    staged = [staged_run(config, name) for name in "abc"]
    outcomes = publish_elsewhere(*staged)
    assert set(outcomes) <= {"published", "conflict"}
    assert "published" in outcomes
    rows = read(config)
    winner = next(run for run in staged if run[0].run_id == rows["run_id"][0])
    assert_frame_equal(rows, expected(winner))

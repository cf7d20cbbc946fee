"""A store that cannot be had: no credentials end with exit 2, one that is away with exit 4."""

from __future__ import annotations

import pytest
import tenacity

from pipelines.storage import storage_errors
from tests.factories import write_config, write_inputs

s3fs = pytest.importorskip("s3fs")


@pytest.fixture
def config(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HOME": str(tmp_path),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",  # nobody listens there
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage_errors, "WAIT", tenacity.wait_none())
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    write_inputs(tmp_path, num_users=6)
    yield write_config(tmp_path)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("setting", ["inputs.users", "output.path", "run.work_dir"])
@pytest.mark.parametrize("command", ["run", "validate"])
def test_no_credentials_is_exit_2_and_a_store_that_is_away_exit_4(
    nightshelf, config, monkeypatch, setting, command
):
    there = ("--set", f"{setting}=s3://bucket/x", "--output", "json")
    done = nightshelf(command, config, *there, check=2)
    assert "credentials" in done.out
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-theirs")
    done = nightshelf(command, config, *there, check=4)
    assert "127.0.0.1:9" in done.out
    assert "a-secret-of-theirs" not in done.out + done.err

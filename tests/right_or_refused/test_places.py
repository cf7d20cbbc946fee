"""A path that names no place is refused before anything is read or written."""

from __future__ import annotations

import os

import pytest

from schemas.places import place
from tests.factories import write_config, write_inputs

NOWHERE = (
    "",
    " ",
    "/",
    "//",
    "s3://",
    "s3:///",
    "s3:///b/x",
    "gs://",
    "gs:///b",
    "abfs://",
    "hdfs://",
    "hdfs:///",
    "file://",
    "file:///",
    "file://host/x",
    "file:x",
    "s3:/b/x",
    "s3:b/x",
    "S3:/b/x",
    "S3:///b",
    "gs:/b",
    "memory://",
    "simplecache::s3://b/x",
    "a\0b",
    "~nobody-of-this-name/x",
)
SETTINGS = ("output.path", "output.quarantine", "run.work_dir", "run.metrics_dir")
INPUTS = ("inputs.users", "inputs.catalog", "inputs.candidates", "inputs.exclusions")


@pytest.mark.parametrize("path", NOWHERE)
def test_a_path_that_leads_nowhere_is_no_place(path):
    with pytest.raises(ValueError, match="names no place"):
        place(path)


@pytest.mark.parametrize(
    ("path", "used"),
    [
        ("runs", "runs"),
        ("/data/x", "/data/x"),
        ("ds=2026-11-28/a:b", "ds=2026-11-28/a:b"),  # a colon is part of a name
        ("at 10:30/x", "at 10:30/x"),
        ("a::b/x", "a::b/x"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("S3://Bucket/X", "s3://Bucket/X"),
        ("Gs://bucket/*.parquet", "gs://bucket/*.parquet"),
        ("hdfs:///user/x", "hdfs:///user/x"),  # of the default name node
        ("abfs://c@a.dfs.core.windows.net/x", "abfs://c@a.dfs.core.windows.net/x"),
        ("file:///data/x", "/data/x"),
        ("file:/data/x", "/data/x"),
        ("~/x", os.path.expanduser("~/x")),
    ],
)
def test_a_place_is_taken_as_it_is_used(path, used):
    assert place(path) == used


@pytest.mark.parametrize("setting", [*SETTINGS, *INPUTS])
@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("run", "s3://"),
        ("run", "file://"),
        ("run", "s3:/b/x"),
        ("run", "s3:///x"),
        ("plan", "s3:/b/x"),
        ("validate", "s3:/b/x"),
    ],
)
def test_a_setting_that_names_no_place_is_named(
    nightshelf, tmp_path, monkeypatch, setting, path, command
):
    write_inputs(tmp_path, num_users=6)
    config = write_config(tmp_path, output__format="parquet")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    before = {p.name for p in tmp_path.iterdir()}
    done = nightshelf(command, config, "--set", f"{setting}={path}", "--output", "json", check=2)
    assert setting in done.err + done.out
    assert "names no place" in done.err + done.out
    made = {p.name for p in tmp_path.iterdir()} - before
    assert made <= {"out", "runs", "out.current"}, "validate tries the other places"
    assert not list(here.iterdir())


def test_an_output_in_the_memory_of_one_process_is_refused(nightshelf, tmp_path):
    write_inputs(tmp_path, num_users=6)
    config = write_config(tmp_path)
    for setting in ("output.path", "run.work_dir", "run.metrics_dir"):
        for command in ("run", "validate"):
            done = nightshelf(
                command, config, "--set", f"{setting}=memory://x", "--output", "json", check=2
            )
            assert f"{setting} is in the memory of one process" in done.out


def test_a_home_folder_and_a_file_url_are_the_places_they_name(nightshelf, tmp_path, monkeypatch):
    write_inputs(tmp_path, num_users=6)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = write_config(tmp_path, output__path="~/out", run__work_dir=f"file:{tmp_path}/work")
    nightshelf("run", config)
    assert (tmp_path / "home/out/ds=2026-11-28/surface=home/_SUCCESS").exists()
    assert list((tmp_path / "work").glob("*/manifest.json"))
    assert not (tmp_path / "~").exists()
    assert not (tmp_path / "file:").exists()


@pytest.mark.parametrize("path", ["s3:/b/x", "s3://", "S3:x", "~nobody-of-this-name/x", ""])
@pytest.mark.parametrize(
    "command",
    [
        ["export", "run.yaml", "--to"],
        ["evaluate", "run.yaml", "--truth"],
        ["evaluate", "run.yaml", "--truth", "truth.parquet", "--by", "segment", "--users"],
        ["evaluate", "run.yaml", "--truth", "truth.parquet", "--train"],
        ["init", "--catalog", "catalog.parquet", "--users"],
        ["init", "--users", "users.parquet", "--candidates"],
    ],
    ids=" ".join,
)
def test_a_path_on_the_command_line_obeys_the_same_rules(
    nightshelf, tmp_path, monkeypatch, command, path
):
    monkeypatch.chdir(tmp_path)
    done = nightshelf(*command, path, check=2)
    said = " ".join((done.out + done.err).split())
    assert command[-1] in said
    assert "names no place" in said
    assert not list(tmp_path.iterdir()), "nothing is made"

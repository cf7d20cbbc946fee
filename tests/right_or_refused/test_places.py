"""A path that names no place is refused before anything is read or written."""

from __future__ import annotations

import os

import pytest

from pipelines.storage.stores import filesystem
from schemas.errors import ConfigError
from schemas.places import place, written_place
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


UNWRITTEN = (
    "http://host/x",
    "HTTPS://host/x",
    "github://org:repo@main/x",
    "$HOME/out",
    "${HOME}/out",
    "s3://bucket/$USER/out",
    "%USERPROFILE%/out",
    "C:\\data\\out",
    "C:/data/out",
    "\\\\server\\share",
)


@pytest.mark.parametrize("path", UNWRITTEN)
def test_what_cannot_be_written_or_was_not_filled_in_is_no_place_for_output(path):
    place(path)  # may be read: a name may be like that
    with pytest.raises(ValueError, match="only read|nothing fills in|path of Windows"):
        written_place(path)


@pytest.mark.parametrize("path", ["out", "s3://b/a$b", "/data/100%/x%y", "c:x/y", "~/x", "a$"])
def test_names_that_only_look_a_little_like_it_are_written_to(path):
    assert written_place(path) == place(path)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("command", ["run", "plan", "validate"])
def test_an_output_that_a_shell_should_have_filled_in_makes_no_folder(
    nightshelf, tmp_path, setting, command
):
    write_inputs(tmp_path, num_users=6)
    config = write_config(tmp_path, output__format="parquet")
    for path in ("$HOME/x", "https://host/x"):
        done = nightshelf(command, config, "--set", f"{setting}={path}", check=2)
        assert setting in done.err + done.out
    assert not (tmp_path / "$HOME").exists()


def test_hadoop_without_its_client_is_not_worth_a_retry(nightshelf, tmp_path, monkeypatch):
    def no_library(*_args, **_kwargs):
        raise OSError("Unable to load libjvm: /usr/lib/libjvm.so: cannot open shared object file")

    monkeypatch.setattr("pipelines.storage.stores.fsspec.filesystem", no_library)
    with pytest.raises(ConfigError, match="cannot be opened") as refused:
        filesystem("hdfs://node/users")
    assert "HADOOP_HOME" in str(refused.value.do)

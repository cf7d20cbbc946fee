"""A command line that cannot be read ends with 2, and says so in JSON where that is asked for."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from jobs.cli.app import app


@pytest.mark.parametrize(
    "line,words",
    [
        ("run --output json", "Missing argument 'CONFIG'"),
        ("run x.yaml --output=json --ds", "'--ds' requires an argument"),
        ("rn x.yaml --output json", "No such command 'rn'"),
        ("run x.yaml --output json --nope", "No such option: --nope"),
        ("--bogus run --output json", "No such option: --bogus"),
        ("plan x.yaml --output json --launcher moon", "Invalid value for '--launcher'"),
        ("catalog chek x.yaml --output json", "No such command 'chek'"),
        ("evaluate run-1 --k x --output json", "Missing option '--truth'"),
    ],
)
def test_a_usage_error_is_the_last_line_of_stdout(line, words):
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 2
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["status"] == "failed"
    assert said["error"]["kind"] == "usage" and said["error"]["exit_code"] == 2
    assert words in said["error"]["message"]
    assert said["error"]["message"].split()[0] in done.stderr, "people read it too"


@pytest.mark.parametrize("line", ["run", "run --output text", "rn --output", "run --set --output"])
def test_people_alone_read_it_else(line):
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 2
    assert not done.stdout.strip() and "Usage: " in done.stderr


def test_help_and_version_are_no_errors():
    for line in ("--help", "--version", "run --help", "catalog --help"):
        done = CliRunner().invoke(app, [*line.split()])
        assert done.exit_code == 0 and '"status"' not in done.stdout

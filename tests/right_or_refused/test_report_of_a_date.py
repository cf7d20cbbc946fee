"""`report CONFIG --ds` finds the run that readers see, whatever became of its inputs since."""

from __future__ import annotations

from tests.factories import write_config, write_inputs


def test_an_input_that_changed_since(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    run = nightshelf("run", config, "--output", "json").json
    same = nightshelf("report", config, "--output", "json").json
    assert same["run_id"] == run["run_id"]
    write_inputs(tmp_path, num_users=41)
    found = nightshelf("report", config, "--ds", "2026-11-28", "--output", "json").json
    assert (found["run_id"], found["status"]) == (run["run_id"], "published")
    (tmp_path / "users.parquet").unlink()
    assert nightshelf("report", config, "--output", "json").json == found
    assert nightshelf("show", config, "--user", "u003").out


def test_a_run_of_these_inputs_that_was_refused_is_the_one(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    write_inputs(tmp_path, num_users=41)
    nightshelf("run", config, "--set", "audit.min_rows=99", check=6)
    args = ("--set", "audit.min_rows=99", "--output", "json")
    assert nightshelf("report", config, *args).json["status"] == "refused"


def test_where_nothing_ended_it_says_so(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    assert "has not ended yet" in nightshelf("report", config, check=4).err
    (tmp_path / "users.parquet").unlink()
    assert "users" in nightshelf("report", config, check=3).err


def test_help_begins_with_init(nightshelf):
    words = " ".join(nightshelf("--help").out.split())
    assert words.index("Start with `nightshelf init`") < words.index("`nightshelf run my.yaml`")

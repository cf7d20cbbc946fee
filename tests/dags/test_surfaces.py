"""surfaces.yaml: a wrong entry is told, all problems at once, and takes no other one away."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

pytest.importorskip("airflow.sdk")

from nightshelf_surfaces import surfaces_and_problems

GOOD = "  good:\n    config: run.yaml\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "surfaces.yaml"
    path.write_text(text)
    return path


def test_wrong_entries_are_one_import_error_and_the_others_stay(dags, tmp_path):
    text = (
        f"surfaces:\n{GOOD}"
        "  typo:\n    config: c\n    shedule: {}\n"
        "  many:\n    config: c\n    retries: many\n    pool_slots: yes\n"
        "  none: {}\n"
        "  later:\n    config: c\n"
    )
    bag = dags(written(tmp_path, text))
    assert sorted(bag.dags) == ["nightshelf_good", "nightshelf_later"]
    ((file, said),) = bag.import_errors.items()
    assert file.endswith("nightshelf_problems.py")
    for words in (
        "typo: unknown ['shedule']", "did you mean 'schedule'?", "none: config is missing",
        "many: retries: expected a whole number of at least 0, got 'many'",
        "many: pool_slots: expected a whole number of at least 1, got bool 'True'",
    ):  # fmt: skip
        assert words in said, said


WRONG = {
    "env:": "env: expected a mapping, got nothing",
    "env: {A: }": "env: A: expected text, got nothing",
    "env: {A: yes}": "env: A: expected text, got bool 'True'; write it in quotes",
    "env: [A]": "env: expected a mapping, got list",
    "retries: many": "retries: expected a whole number",
    "retries: -1": "retries: expected a whole number of at least 0",
    "pool_slots: 99999999999999999999": "pool_slots: expected a whole number",
    "retries: 1.5": "retries: expected a whole number",
    "retry_delay_s: .nan": "retry_delay_s: expected a number",
    "timeout_hours: .inf": "timeout_hours: expected a number",
    "ready: home": "ready: expected a list, got 'home'",
    "ready: [1]": "ready: expected words, got int '1'",
    "command: nightshelf run": "command: expected a list, got 'nightshelf run'",
    "command: []": "command: expected at least one word",
    "tags: a": "tags: expected a list, got 'a'",
    "pool: 3": "pool: expected text, got int '3'",
    "start_date: tomorrow": "start_date: expected a date, YYYY-MM-DD, got 'tomorrow'",
    "start_date: 2026-02-30": "start_date: expected a date",
    "launcher: slurm": "launcher is local or spark, not 'slurm'",
    "spark_steps: [audit]": "spark_steps may be plan, prepare, score, not 'audit'",
    "spark_steps: score": "spark_steps: expected a list, got 'score'",
    "schedule: daily": "schedule: expected a mapping with cron or assets, got 'daily'",
    "schedule: {assets: []}": "schedule: assets: expected at least one word",
    "schedule: {assets: users}": "schedule: assets: expected a list, got 'users'",
    "schedule: {assets: [a], keys: dates}": "keys is date or timestamp, not 'dates'",
    'schedule: {cron: "0 2 * * *", timezone: Berlin}': "timezone: expected a time zone",
    'schedule: {cron: "0 2 * * *", timezone: 2}': "timezone: expected a time zone",
    'schedule: {cron: "0 2 * * *", run_offset: one}': "run_offset: expected a whole number",
    'schedule: {cron: "0 25 * * *"}': "cron: expected numbers from 0 to 23, got '25'",
    'schedule: {cron: "0 2 * *"}': "cron: expected five fields",
    'schedule: {cron: "@nightly"}': "cron: expected five fields or one of @hourly",
    'schedule: {cron: "1,,2 2 * * *", timezone: Europe/Berlin}': "cron: expected numbers",
    'schedule: {cron: "*/0 2 * * *"}': "cron: expected numbers from 0 to 59, got '*/0'",
    'schedule: {cron: "-5 2 * * *"}': "cron: expected numbers from 0 to 59, got '-5'",
    'schedule: {cron: "jan 2 * * *"}': "cron: expected numbers from 0 to 59, got 'jan'",
    'schedule: {cron: "0 2 * * mon#9"}': "cron: expected numbers from 0 to 7",
    'schedule: {cron: "0 2 * * L"}': "cron: expected numbers from 0 to 7",
    'schedule: {cron: "0 2 * * *", run_offset: -1000000}': "run_offset: expected a whole number",
    "config: d": "config stands twice, in lines 5 and 6",
}


@pytest.mark.parametrize("line", WRONG)
def test_every_type_is_checked_and_the_others_stay(tmp_path, line):
    path = written(tmp_path, f"surfaces:\n{GOOD}  bad:\n    config: c\n    {line}\n")
    found, problems = surfaces_and_problems(path)
    assert [one.name for one in found] == ["good"]
    assert any(f"bad: {WRONG[line]}" in one or WRONG[line] in one for one in problems), problems
    assert all(": bad: " in one for one in problems)


RIGHT = [
    "schedule:", "deadline_hours: 1.5", "retry_delay_s: 7", 'schedule: {cron: "@daily"}',
    'schedule: {cron: "*/15 0-6,22 1 jan-mar mon#1", timezone: Asia/Kathmandu, run_offset: 0}',
    'schedule: {cron: "0 2 * * 7"}', "env: {A: 1, B: x}", "start_date: '2026-01-01'",
    'schedule: {cron: "0 2 L * ?"}', 'schedule: {cron: "0 2 * * L5"}',
    'schedule: {cron: "5-50/5,59 2 1,15 JAN mon-fri"}',
    'start_date: 9999-12-31\n    schedule: {cron: "0 2 1 * *", timezone: Asia/Tokyo}',
]  # fmt: skip


@pytest.mark.parametrize("line", RIGHT)
def test_what_is_right_is_taken(tmp_path, line):
    path = written(tmp_path, f"surfaces:\n  one:\n    config: c\n    {line}\n")
    found, problems = surfaces_and_problems(path)
    assert problems == []
    assert [one.name for one in found] == ["one"]


def test_a_yaml_merge_is_no_doubled_key(tmp_path):
    text = "surfaces:\n  one: &a {config: c, retries: 1}\n  two:\n    <<: *a\n    retries: 2\n"
    found, problems = surfaces_and_problems(written(tmp_path, text))
    assert problems == []
    assert [one.retries for one in found] == [1, 2]


@pytest.mark.parametrize("names", [("a b", "a_b"), ("a/b", "a b"), ("A", "a")])
def test_two_surfaces_that_would_be_one_dag_are_refused_and_named(dags, tmp_path, names):
    lines = "".join(f"  {name!r}:\n    config: c\n" for name in names)
    bag = dags(written(tmp_path, f"surfaces:\n{GOOD}{lines}"))
    assert sorted(bag.dags) == ["nightshelf_good"]
    (said,) = bag.import_errors.values()
    assert f"{names[0]!r} and {names[1]!r} would be one DAG" in said


def test_a_surface_that_stands_twice_is_refused_in_both_places(dags, tmp_path):
    path = written(tmp_path, f"surfaces:\n  x: {{config: a}}\n{GOOD}  x: {{config: b}}\n")
    bag = dags(path)
    assert sorted(bag.dags) == ["nightshelf_good"]
    (said,) = bag.import_errors.values()
    assert "x: the surface stands twice, in lines 2 and 5" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("surface:\n  x: {config: c}\n", "unknown ['surface']; known are"),
        ("surface:\n  x: {config: c}\n", "did you mean 'surfaces'?"),
        ("surface:\n  x: {config: c}\n", "the key surfaces is missing"),
        ("surfaces: [x]\n", "surfaces: expected a mapping, got list"),
        ("- x\n", "expected the keys defaults and surfaces, got list"),
        ("", "expected the keys defaults and surfaces, got nothing"),
        ("defaults: 3\nsurfaces: {}\n", "defaults: expected a mapping, got int"),
        (f"surfaces: {{{'x' * 300}: {{config: c}}}}\n", "a surface's name has at most 200"),
        ("surfaces: {1: {config: c}}\n", "a surface's name is text, not int '1'"),
    ],
)
def test_what_is_wrong_with_the_file_is_told(dags, tmp_path, text, words):
    bag = dags(written(tmp_path, text))
    assert words in next(iter(bag.import_errors.values()))


def test_what_a_provider_does_not_take_fails_as_a_dag_with_its_message(dags, tmp_path):
    lines = (
        "  bad:\n    config: c\n    launcher: spark\n    spark: {application: a.py, memmory: 1}\n"
    )
    bag = dags(written(tmp_path, f"surfaces:\n{GOOD}{lines}"))
    assert bag.import_errors == {}
    assert len(bag.dags["nightshelf_good"].tasks) == 6
    (task,) = bag.dags["nightshelf_bad"].tasks
    with pytest.raises(Exception, match="memmory"):
        task.execute({})


def test_a_weekly_schedule_at_an_hour_that_the_clock_skips_is_refused(tmp_path):
    """One tick back from where Airflow moves it, it would meet itself: a date twice, and one
    never.
    """
    text = """surfaces:
  bad: {config: c, schedule: {cron: "30 2 * * 0", timezone: Europe/Berlin}}
  ahead: {config: c, schedule: {cron: "30 2 * * 0", timezone: Europe/Berlin, run_offset: 0}}
  later: {config: c, schedule: {cron: "30 3 * * 0", timezone: Europe/Berlin}}
  daily: {config: c, schedule: {cron: "30 2 * * *", timezone: Europe/Berlin}}
"""
    found, (said,) = surfaces_and_problems(written(tmp_path, text))
    assert [one.name for one in found] == ["ahead", "later", "daily"]
    assert "the clock of Europe/Berlin skips" in said
    assert str(date.today().year)[:2] in said

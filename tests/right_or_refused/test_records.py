"""Records of this release are read by the next, those of another are read or refused in a sentence.

tests/schemas/golden holds the records of a tiny run, as the release that made them wrote them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.spark.attempts import Attempt
from jobs.spark.tables import TableCopy
from pipelines.publish.pointer import Pointer
from pipelines.shards.profile import RunProfile
from pipelines.storage.records import read_record
from schemas.errors import RecordError, StorageError
from schemas.gates import AuditReport
from schemas.markers import Launch, Marker
from schemas.records import FORMAT, Stored, parse_record
from schemas.runs import RunManifest, RunPlan, ShardReceipt
from tests.factories import write_config, write_inputs

GOLDEN = Path(__file__).parents[1] / "schemas" / "golden"
MODELS: dict[str, type[Stored]] = {
    "plan": RunPlan,
    "receipt": ShardReceipt,
    "manifest": RunManifest,
    "audit": AuditReport,
    "profile": RunProfile,
    "published": Marker,
    "pointer": Pointer,
    "launch": Launch,
    "attempt": Attempt,
    "copy": TableCopy,
}


def golden(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def within(old: Any, new: Any) -> bool:
    """Whether the new record says all that the old one says; it may say more."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(k in new and within(v, new[k]) for k, v in old.items())
    if isinstance(old, list):
        return len(old) == len(new) and all(map(within, old, new))
    return bool(old == new)


@pytest.mark.parametrize("name", MODELS)
def test_records_of_this_release_stay_readable(name):
    path = GOLDEN / f"{name}.json"
    record = read_record(MODELS[name], str(path))
    assert golden(name)["format"] == 1
    again = json.loads(record.model_dump_json())
    assert within(golden(name), again)
    assert parse_record(MODELS[name], again, "here") == record
    assert getattr(record, "unread", ()) == ()


@pytest.mark.parametrize("name", MODELS)
def test_a_record_without_a_format_is_the_first(name):
    raw = golden(name)
    del raw["format"]
    record = parse_record(MODELS[name], raw, "here")
    assert record.format == FORMAT
    assert record == parse_record(MODELS[name], golden(name), "here")
    assert parse_record(MODELS[name], {**raw, "format": 0}, "here") == record
    assert parse_record(MODELS[name], {**raw, "added_later": {"a": [1]}}, "here") == record


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("found", [FORMAT + 1, 99, -1, "1", None, True, 1.5])
def test_another_format_is_refused_in_a_sentence(name, found):
    with pytest.raises(RecordError) as caught:
        parse_record(MODELS[name], {**golden(name), "format": found}, "/data/it.json")
    text = str(caught.value)
    for part in ("/data/it.json", f"format {FORMAT}", f"format {found!r}", "release"):
        assert part in text
    assert "\n" not in text
    assert isinstance(caught.value, StorageError)
    assert (caught.value.exit_code, caught.value.retryable) == (2, False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("raw", [{}, [], None, 3, "text", {"format": 1}])
def test_what_is_no_such_record_is_refused_in_a_sentence(name, raw):
    with pytest.raises(StorageError) as caught:
        parse_record(MODELS[name], raw, "/data/it.json")
    text = str(caught.value)
    assert "cannot be read" in text
    assert "/data/it.json" in text
    assert "\n" not in text
    assert "pydantic" not in text


def test_every_stored_record_is_tested_here():
    def below(kind: type[Stored]) -> set[type[Stored]]:
        return {kind} | {one for sub in kind.__subclasses__() for one in below(sub)}

    named = {kind for kind in below(Stored) if kind.__module__.split(".")[0] != "tests"}
    rest = {kind.__name__ for kind in named - {Stored, *MODELS.values()}}
    assert rest <= {"ManifestHead", "Attempt", "_EngineEnd"}  # a part of one; of one launch only
    assert Attempt.NAME != Stored.NAME


def test_settings_of_another_release_are_left_out_and_named():
    raw = golden("plan")
    config = raw["config"]
    config["task"]["gone_since"] = 3
    config["goners"] = {"a": 1}
    config["engine"]["dtype"] = "float8"
    config["audit"]["warn"] = ["a_gate_of_then"]
    config["run"]["shard_users"] = 10**12
    del config["report"], config["audit"]["max_score_drift"], config["task"]["collisions"]
    plan = parse_record(RunPlan, raw, "here")
    assert set(plan.unread) == {
        "task.gone_since", "goners", "engine.dtype", "audit.warn", "run.shard_users"
    }  # fmt: skip
    assert plan.config.engine.dtype == "float32"
    assert plan.config.task.collisions == "all"
    assert "unread" not in plan.model_dump()
    del config["output"]["path"]
    with pytest.raises(StorageError, match=r"a run's plan cannot be read.*config\.output\.path"):
        parse_record(RunPlan, raw, "here")


def as_of_another_release(run_dir: Path) -> None:
    """A run's records as a release left them that had other settings."""
    for name in ("plan", "manifest"):
        path = run_dir / f"{name}.json"
        raw = json.loads(path.read_text())
        plan = raw["plan"] if name == "manifest" else raw
        raw.pop("checksum", None)
        plan["config"]["task"]["gone_since"] = 3
        plan["config"]["engine"]["speculative"] = {"depth": 2}
        del plan["config"]["report"], plan["config"]["audit"]["max_score_drift"]
        raw.pop("format", None)
        plan.pop("format", None)
        path.write_text(json.dumps(raw))


def test_a_run_of_another_release_is_looked_at_rolled_back_and_cleared(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    first = nightshelf("run", config, "--output", "json").json
    as_of_another_release(Path(first["run_dir"]))
    second = nightshelf("run", config, "--set", "task.k=3", "--output", "json").json
    runs = nightshelf("status", config, "--output", "json").json["runs"]
    assert {run["status"] for run in runs} == {"published", "replaced"}
    done = nightshelf("rollback", config, "--run", first["run_id"], "--output", "json").json
    assert done["run_id"] == first["run_id"]
    assert nightshelf("show", config, "--user", "u003", "--output", "json").out
    nightshelf("plan", config)
    nightshelf("report", first["run_dir"])
    nightshelf("gc", config, "--dry-run")
    refused = nightshelf("score", first["run_dir"], check=2).err
    assert "another release" in refused
    assert "task.gone_since" in refused
    assert second["run_id"] != first["run_id"]


def test_a_run_of_a_later_format_is_refused_and_hides_no_other(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    run_dir = Path(nightshelf("run", config, "--output", "json").json["run_dir"])
    raw = json.loads((run_dir / "plan.json").read_text())
    raw.pop("checksum", None)
    (run_dir / "plan.json").write_text(json.dumps({**raw, "format": 2}))
    (run,) = nightshelf("status", config, "--output", "json").json["runs"]
    assert run["status"] == "unreadable"
    error = nightshelf("score", run_dir, "--output", "json", check=2).json["error"]
    assert error["kind"] == "record"
    assert "format 2" in error["message"]
    nightshelf("gc", config)


def test_a_pointer_of_a_later_format_is_not_passed_over(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    (first,) = (tmp_path / "out.current").glob("*/*/00000001.json")
    raw = {**json.loads(first.read_text()), "format": 2, "generation": 2}
    first.with_name("00000002.json").write_text(json.dumps(raw))
    for command in (["show", config, "--user", "u003"], ["run", config], ["rollback", config]):
        error = nightshelf(*command, "--output", "json", check=2).json["error"]
        assert (error["kind"], "format 2" in error["message"]) == ("record", True)
        assert "00000002.json" in error["message"]

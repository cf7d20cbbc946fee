"""Figures that tell the truth: times, costs, verdicts of gates, histograms."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from pipelines.report.distributions import in_bars, of_numbers
from schemas.counts import Counts
from schemas.gates import GateResult
from schemas.runs import RunManifest, ShardReceipt, StagedFile, working_seconds
from tests.factories import write_config, write_inputs


def receipt(shard: int, start: float | None, seconds: float) -> ShardReceipt:
    file = StagedFile(path="x", rows=0, bytes=0, xxh3="")
    return ShardReceipt(
        run_id="r",
        shard=shard,
        attempt="a",
        files={"recommendations": file},
        counts=Counts(users_in=10),
        seconds=seconds,
        engine_seconds=seconds / 2,
        finished_at=None if start is None else start + seconds,
    )


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([(0, 4), (4, 2)], 6),  # one after the other
        ([(0, 4), (1, 5)], 6),  # two workers
        ([(0, 10), (2, 3)], 10),  # one inside the other
        ([(0, 4), (3600, 2)], 6),  # resumed an hour later
        ([(None, 4), (None, 5)], 9),  # receipts that do not say when
        ([], 0),
    ],
)
def test_the_time_of_a_run_is_that_in_which_shards_were_at_work(spans, seconds):
    receipts = [receipt(n, start, length) for n, (start, length) in enumerate(spans)]
    assert working_seconds(receipts) == seconds
    assert working_seconds(reversed(receipts)) == seconds


def test_a_run_that_is_repeated_or_made_in_steps_says_the_same_of_its_speed(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    first = nightshelf("run", config, "--output", "json").json
    again = nightshelf("run", config, "--output", "json").json
    assert again["seconds"] == first["seconds"] > 0
    assert again["users_per_s"] == first["users_per_s"]
    run_id = first["run_id"]
    nightshelf("audit", config, "--run-id", run_id)
    steps = nightshelf("publish", config, "--run-id", run_id, "--output", "json").json
    assert steps["users_per_s"] == first["users_per_s"]


def test_a_worker_of_four_devices_costs_four_times_as_much(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, prompt={"template": "Hi"}, run__price_per_hour=7.0)
    nightshelf("run", config)
    (path,) = tmp_path.glob("runs/2*/manifest.json")
    one = json.loads(path.read_text())
    one["shards"] = [{**shard, "seconds": 900.0} for shard in one["shards"]]
    four = json.loads(json.dumps(one))
    four["plan"]["config"]["engine"] |= {"backend": "trtllm", "model": "m", "tensor_parallel": 4}
    cheap, dear = (RunManifest.model_validate(m).summary() for m in (one, four))
    assert cheap["device_hours"] == len(one["shards"]) / 4
    assert dear["device_hours"] == 4 * cheap["device_hours"]
    assert dear["cost"] == 4 * cheap["cost"] == 4 * 7.0 * cheap["device_hours"]


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "passed"),
        ({"passed": False}, "refused"),
        ({"passed": False, "action": "warn"}, "warned"),
        ({"allowed": "any"}, "no limit"),
        ({"allowed": "any", "value": None}, "no limit"),
        ({"value": None}, "nothing to compare"),
    ],
)
def test_the_verdict_of_a_gate(changes, verdict):
    gate = {"gate": "g", "passed": True, "value": 1.0, "allowed": ">= 0.5", **changes}
    assert GateResult(**gate).verdict == verdict


def test_a_gate_without_a_limit_or_a_baseline_did_not_pass(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, audit={"min_overlap": 0.5, "max_quarantine_rate": 1.0})
    run_id = nightshelf("run", config, "--output", "json").json["run_id"]
    found = nightshelf("audit", config, "--run-id", run_id, "--output", "json").json["gates"]
    verdicts = {gate["gate"]: gate["verdict"] for gate in found}
    assert verdicts["overlap"] == "nothing to compare"
    assert verdicts["score_drift"] == "no limit"
    assert verdicts["coverage"] == "no limit"  # 0 is what every share is at least
    assert verdicts["quarantine_rate"] == "no limit"
    assert verdicts["duplicates"] == "passed"
    (page,) = tmp_path.glob("runs/2*/report.html")
    assert '<span class="none">nothing to compare</span>' in page.read_text()
    text = nightshelf("audit", config, "--run-id", run_id).out
    assert "no limit" in text


# --- histograms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1.0, 0.25, -3.5, 1e-12, -1e9])
def test_a_histogram_of_equal_values_is_one_bar_around_them(value):
    frame = pl.LazyFrame({"x": [value] * 7 + [None]})
    found = of_numbers(frame, "x")
    assert found.total == 7
    assert found.edges[0] < value < found.edges[-1]
    assert found.edges[-1] - found.edges[0] <= max(1.0, abs(value))
    assert (found.p5, found.p50, found.p95) == (value, value, value)
    assert in_bars(frame, "x", found.edges) == (7,)


def test_a_histogram_of_values_that_only_just_differ():
    values = [1.0, np.nextafter(1.0, 2.0)]
    found = of_numbers(pl.LazyFrame({"x": values}), "x")
    assert found.total == 2
    assert 0.9 < found.edges[0] < 1.0 < found.edges[-1] < 1.1


# --- estimates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["published.json", "manifest.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 99}'])
def test_an_estimate_hangs_on_no_record(nightshelf, tmp_path, name, content):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    assert "by the speed of run" in nightshelf("plan", config).out
    (path,) = tmp_path.glob(f"runs/2*/{name}")
    path.write_bytes(content)
    assert "the records of the last run cannot be read" in nightshelf("plan", config).out

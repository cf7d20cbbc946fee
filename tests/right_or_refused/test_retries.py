"""One rule of what is tried again, in this process and in workers; Spark's is in tests/spark."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.running.scheduler import Attempts, Next, needs_new_engine, next_step
from jobs.running.shard_worker import panics_are_failures
from pipelines.inputs.prepared import shards_of
from pipelines.planning.plan import plan_run
from schemas import errors
from schemas.config_file import load_config
from schemas.errors import EngineError, NightshelfError, ShardFailedError, TableError
from tests.factories import write_config, write_inputs
from tests.failing import PanicException


def tree(kind: type[NightshelfError] = NightshelfError) -> list[type[NightshelfError]]:
    return [kind, *(one for sub in kind.__subclasses__() for one in tree(sub))]


KINDS = [kind for kind in tree() if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_tried_again_is_what_says_so(kind):
    error = kind("it failed")
    if error.retryable:
        assert [next_step(error, n, 3) for n in (1, 2, 3)] == [Next.again, Next.again, Next.give_up]
    else:
        assert {next_step(error, n, 3) for n in (1, 2, 3)} == {Next.end_the_run}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("retryable", [None, True, False])
def test_an_error_is_the_same_behind_a_process_and_behind_json(kind, retryable):
    error = kind("what", expected="a", got="b", where="c", do="d", field="e")
    if retryable is not None:
        error.retryable = retryable  # of this one
    ways = [
        pickle.loads(pickle.dumps(error)),
        NightshelfError.of_record(json.loads(json.dumps(error.as_record()))),
    ]
    for found in ways:
        assert type(found) is kind
        assert found.as_record() == error.as_record()
        assert (str(found), found.exit_code) == (str(error), error.exit_code)
        assert found.retryable == error.retryable


def test_an_error_of_another_release_is_still_one():
    record = TableError("what").as_record() | {"class": "NewError"}
    assert str(NightshelfError.of_record(record)) == "what"


def test_a_panic_is_a_failure_and_an_interrupt_is_not():
    with (
        pytest.raises(ShardFailedError, match="x failed: got a library panicked: boom"),
        panics_are_failures("x"),
    ):
        raise PanicException("boom\nnote")
    with pytest.raises(KeyboardInterrupt), panics_are_failures("x"):
        raise KeyboardInterrupt
    assert needs_new_engine(ShardFailedError("x"))
    assert not needs_new_engine(TableError("x"))


def test_attempts_are_counted_by_shard(tmp_path):
    write_inputs(tmp_path, num_users=10)
    plan = plan_run(load_config(write_config(tmp_path, run__shard_users=5, run__max_attempts=2)))
    one, two = shards_of(plan)
    progress = SimpleNamespace(start=lambda users: None, note=lambda message: None)
    attempts = Attempts(plan, [one, two], progress)
    assert attempts.failed_once(one, ShardFailedError("a"))
    assert attempts.failed_once(two, ShardFailedError("b"))
    assert not attempts.failed_once(one, ShardFailedError("c"))
    assert attempts.failed == {0: "c"}
    with pytest.raises(EngineError):
        attempts.failed_once(two, EngineError("d"))


def marked(folder, backend, **changes):
    """Five shards, in the first of which that has it a user is marked."""
    tables = write_inputs(folder, num_users=30)
    names = tables["users"].column("user_id").to_pylist()
    mood = pa.array(["!" if name == "u005" else "ok" for name in names])
    pq.write_table(tables["users"].append_column("mood", mood), folder / "users.parquet")
    return write_config(
        folder,
        engine__backend=f"tests.failing:{backend}",
        prompt__template="{text:mood}{history}{user_vector}",
        run__max_attempts=3,
        run__shard_users=6,
        **changes,
    )


PERMANENT = {"table_error": 3, "config_error": 2, "engine_error": 5}
PASSING = ("storage_error", "broken", "panic")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("backend", PERMANENT)
def test_what_stays_ends_the_run_at_once_as_what_it_is(
    nightshelf, nightshelf_process, tmp_path, trouble, backend, workers
):
    config = marked(tmp_path, backend, run__workers=workers)
    (trouble / "fail").touch()
    run = nightshelf if workers == 0 else nightshelf_process
    done = run("run", config, "--output", "json", check=PERMANENT[backend])
    assert "trying again" not in done.err
    assert done.json["error"]["exit_code"] == PERMANENT[backend]
    if backend == "table_error":
        assert "users: rows cannot be decoded: got damage (users.parquet; shard-" in done.err


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("backend", PASSING)
def test_what_passes_is_tried_again(
    nightshelf, nightshelf_process, tmp_path, trouble, backend, workers
):
    config = marked(tmp_path, backend, run__workers=workers)
    (trouble / "once").touch()
    run = nightshelf if workers == 0 else nightshelf_process
    done = run("run", config)
    assert done.err.count("trying again (1 so far)") == 1
    assert not (trouble / "once").exists()


@pytest.mark.parametrize("backend", PASSING)
def test_it_is_tried_as_often_as_is_allowed_and_the_others_are_done(
    nightshelf, tmp_path, trouble, backend
):
    config = marked(tmp_path, backend, run__workers=0)
    (trouble / "fail").touch()
    done = nightshelf("run", config, "--output", "json", check=4)
    assert "1 of 5 shards failed" in done.err
    assert done.err.count("trying again") == 2
    assert "given up after 3 attempts" in done.err
    assert len(list(tmp_path.glob("runs/*/receipts/*.json"))) == 4
    one = nightshelf("run", config, "--set", "run.max_attempts=1", check=4)
    assert "given up after 1 attempts" in one.err
    assert "trying again" not in one.err


def test_a_device_that_is_lost_to_the_process_fails_what_is_left(nightshelf, tmp_path, trouble):
    config = marked(tmp_path, "lost_device", run__workers=0)
    (trouble / "fail").touch()
    done = nightshelf("run", config, check=4)
    assert "illegal memory access" in done.err
    (manifest,) = tmp_path.glob("runs/*/manifest.json")
    reasons = json.loads(manifest.read_text())["failed_shards"].values()
    assert reasons
    assert all("then no new engine: the device does not answer" in one for one in reasons)

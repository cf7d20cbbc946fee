"""SIGTERM in every phase of a run: the command ends with 143 and one sentence, leaves nothing half,
and the same command afterwards publishes what an undisturbed run does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_crash import PARTITION, ROOT, receipts, wait_for, workers_of
from tests.factories import write_config, write_inputs

SENTENCE = "nightshelf: ended by SIGTERM; run the same command again to continue"
POINTS = 8


def start(*arguments: str | Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jobs", *map(str, arguments), "--output", "json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """What it said; it must have ended as asked."""
    out, err = process.communicate(timeout=120)
    said(process.returncode, out, err)
    return err


def said(code: int, out: str, err: str) -> None:
    assert code == 143, f"{code}\n{out}\n{err}"
    assert "Traceback" not in err
    assert err.splitlines().count(SENTENCE) == 1
    (line,) = out.splitlines()
    assert json.loads(line)["error"]["kind"] == "terminated"
    assert json.loads(line)["error"]["exit_code"] == 143


def published(folder: Path) -> dict[str, bytes]:
    """The files that readers see; none, or all of one run."""
    there = {p.name: p.read_bytes() for p in (folder / PARTITION).glob("*.parquet")}
    assert not there or (folder / PARTITION / "_SUCCESS").exists()
    return there


@pytest.fixture
def undisturbed(nightshelf, tmp_path_factory):
    """What a run publishes that nobody disturbed, in a folder of its own; file names hold the run's
    id, which is of the inputs.
    """

    def rows(config: Path, folder: Path) -> dict[str, bytes]:
        import shutil

        nightshelf("run", config, "--set", "run.workers=0")
        want = published(folder)
        for name in ("out", "out.current", "runs"):
            shutil.rmtree(folder / name, ignore_errors=True)
        return want

    return rows


@pytest.mark.parametrize("workers", [0, 2])
def test_while_scoring(nightshelf, tmp_path, trouble, undisturbed, workers):
    write_inputs(tmp_path, num_users=60)
    config = write_config(
        tmp_path,
        engine__backend="tests.trouble:trouble_backend",
        run__workers=workers,
        run__shard_users=6,
    )
    want = undisturbed(config, tmp_path)
    (trouble / "slow").write_text("0.1")
    process = start("run", config)
    wait_for(lambda: len(receipts(tmp_path)) >= 2, "two shards")
    mine = workers_of(process)
    assert len(mine) == workers
    process.send_signal(signal.SIGTERM)
    ended(process)
    wait_for(lambda: not any(w.is_running() for w in mine), "workers to end", 15)
    assert published(tmp_path) == {}
    done = receipts(tmp_path)
    assert 2 <= len(done) < 10
    (trouble / "slow").unlink()
    nightshelf("run", config, "--set", "run.workers=0")
    after = receipts(tmp_path)
    assert {name: after[name] for name in done} == done, "a finished shard was scored again"
    assert published(tmp_path) == want


@pytest.mark.parametrize("to_all", [False, True], ids=["the driver", "the whole group"])
@pytest.mark.parametrize("workers", [0, 2])
def test_while_the_engine_starts(nightshelf, tmp_path, trouble, workers, to_all):
    write_inputs(tmp_path)
    config = write_config(
        tmp_path, engine__backend="tests.trouble:slow_start_backend", run__workers=workers
    )
    (trouble / "slow_start").touch()
    process = start("run", config)
    wait_for(lambda: (trouble / "starts").exists(), "an engine that starts")
    mine = workers_of(process)
    if to_all:
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
    ended(process)
    wait_for(lambda: not any(w.is_running() for w in mine), "workers to end", 15)
    (trouble / "slow_start").unlink()
    nightshelf("run", config, "--set", "run.workers=0")
    assert published(tmp_path)


def changing(folder: Path, at: int, config: Path) -> subprocess.CompletedProcess[str]:
    """Run, and ask it to end at the n-th change of a file."""
    return subprocess.run(
        [sys.executable, "-m", "tests.killer", folder, str(at), "run", config, "--output", "json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "NIGHTSHELF_TEST_SIGNAL": "SIGTERM"},
    )


def test_at_any_moment_of_a_run(nightshelf, tmp_path):
    """From the plan to the report: moments are changes of files, evenly over the whole run."""
    write_inputs(tmp_path, num_users=20)
    config = write_config(tmp_path, run__shard_users=10)
    whole = changing(tmp_path, 0, config)
    assert whole.returncode == 0, whole.stderr
    changes = int(whole.stderr.splitlines()[-1])
    want = published(tmp_path)
    ends = set()
    for at in range(1, changes + 1, max(1, changes // POINTS)):
        for name in ("out", "out.current", "runs"):
            subprocess.run(["rm", "-rf", tmp_path / name], check=True)
        done = changing(tmp_path, at, config)
        said(done.returncode, done.stdout, "\n".join(done.stderr.splitlines()[:-1]))
        seen = published(tmp_path)
        assert seen in ({}, want), f"a half at change {at}"
        ends.add(bool(seen))
        nightshelf("run", config)
        assert published(tmp_path) == want
    assert ends == {False, True}, "moments before and after the publish"


STUCK = """
import ctypes, typer
from jobs.cli.options import Output, guard
def body():
    print("here", flush=True)
    ctypes.CDLL(None).system(b"exec sleep 600 >/dev/null 2>&1")
app = typer.Typer()
@app.command()
def main():
    import jobs.running.ending
    jobs.running.ending.GRACE_S = GRACE
    guard(body, Output.json, False)
app()
"""


def stuck(grace: float) -> subprocess.Popen[str]:
    """A command in a library that never comes back: it waits in C for a process of its group."""
    code = STUCK.replace("= GRACE", f"= {grace}")
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "here\n"
    # Before C has started it, a handler of Python's would still run, and end all by itself.
    wait_for(psutil.Process(process.pid).children, "what C waits for")
    return process


def test_a_library_that_does_not_come_back_is_cut_off(tmp_path):
    process = stuck(0.5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    os.killpg(process.pid, signal.SIGKILL)  # what C waited for
    said(process.returncode, out, err)


def test_a_second_signal_ends_it_at_once():
    process = stuck(600)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    os.killpg(process.pid, signal.SIGKILL)  # what C waited for
    assert process.returncode == 143


def test_as_process_1_of_a_container(nightshelf, tmp_path, trouble):
    """The kernel sends process 1 only those signals for which it has a handler."""
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        alone = ["unshare", "--pid", "--fork"]
        if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
            pytest.skip("no process namespaces for us here")
    write_inputs(tmp_path)
    config = write_config(
        tmp_path, engine__backend="tests.trouble:slow_start_backend", run__workers=0
    )
    (trouble / "slow_start").touch()
    command = [sys.executable, "-m", "jobs", "run", str(config), "--output", "json"]
    process = subprocess.Popen(
        [*alone, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: (trouble / "starts").exists(), "an engine that starts")
    (inside,) = psutil.Process(process.pid).children()
    inside.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    said(process.returncode, out, err)

"""Publishers of one partition at the same time, publishers of different ones, and readers."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from pipelines.publish import publish_run, read_current
from pipelines.storage import files
from schemas.errors import AccessError, ConflictError
from tests.publish.runs import (
    DS,
    config_of,
    expected,
    publish,
    publish_elsewhere,
    publish_while,
    read,
    staged_run,
)


@pytest.mark.parametrize("before", [None, "zero"], ids=["first publish", "over older rows"])
def test_of_two_publishers_of_one_partition_the_second_fails(table_format, tmp_path, before):
    config = config_of(tmp_path, table_format)
    if before:
        publish(config, before)
    first, second = staged_run(config, "first"), staged_run(config, "second")
    with pytest.raises(ConflictError, match=r"another publisher.*Running the same command again"):
        publish_while(second, first)
    assert_frame_equal(read(config), expected(first))
    publish_run(*second)
    assert_frame_equal(read(config), expected(second))
    if table_format == "parquet":
        partition = tmp_path / "out" / f"ds={DS}" / "surface=home"
        assert len(list(partition.glob("*.parquet"))) == 3
        assert (partition / "_SUCCESS").exists()
        waiting = tmp_path / "out.current" / f"ds={DS}" / "surface=home"
        assert {p.suffix for p in waiting.iterdir()} == {".json"}


@pytest.mark.parametrize("when", ["before the file is renamed", "behind that"])
def test_a_publisher_whose_files_were_cleared_away_while_it_wrote_them_conflicts(
    tmp_path, monkeypatch, when
):
    """Who comes first removes what the others have written, in the middle of their writing too."""
    config = config_of(tmp_path, "parquet")
    first, second = staged_run(config, "first"), staged_run(config, "second")
    meanwhile, plain = [first], files.atomic_target

    @contextmanager
    def overtaken(path):
        with plain(path) as target:
            yield target
            if when.startswith("before") and meanwhile:
                publish_run(*meanwhile.pop())
        if meanwhile and "/new-" in path:
            publish_run(*meanwhile.pop())

    monkeypatch.setattr("pipelines.publish.parquet.files.atomic_target", overtaken)
    with pytest.raises(ConflictError, match="another publisher"):
        publish_run(*second)
    assert not meanwhile
    assert_frame_equal(read(config), expected(first))


def test_the_same_run_published_twice_at_once_is_no_conflict(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    run = staged_run(config, "a")
    publish_while(run, run)
    assert_frame_equal(read(config), expected(run))


def test_orphans_that_may_not_be_removed_are_left(tmp_path, monkeypatch):
    """Writers of a store are not always allowed to remove."""
    config = config_of(tmp_path, "delta")
    first, second = staged_run(config, "first"), staged_run(config, "second")
    kept = []

    def refuse(path):
        kept.append(path)
        raise AccessError("a file may not be removed", where=path)

    monkeypatch.setattr("pipelines.publish.delta.files.remove_if_there", refuse)
    with pytest.raises(ConflictError):
        publish_while(second, first)
    assert kept
    assert_frame_equal(read(config), expected(first))


def test_an_emptied_partition_conflicts_too(table_format, tmp_path):
    config = config_of(tmp_path, table_format)
    publish(config, "a")
    with pytest.raises(ConflictError):
        publish_while(staged_run(config, "b"), staged_run(config, "none", users=0))
    assert len(read(config)) == 0


def test_publishers_of_different_partitions_both_land(table_format, tmp_path):
    """C31 (a branch that was switched to lost what another writer committed)."""
    config = config_of(tmp_path, table_format)
    others = [config_of(tmp_path, table_format, surface="other"),
              config_of(tmp_path, table_format, ds="2026-11-29")]  # fmt: skip
    wanted = [staged_run(other, "b") for other in others]
    run = staged_run(config, "a")
    publish_while(run, *wanted)
    for mine, theirs in [(config, run), *zip(others, wanted, strict=True)]:
        assert_frame_equal(read(mine), expected(theirs))


def test_processes_at_once_leave_one_set_each(table_format, tmp_path):
    """Six processes start together: three on one partition, three on partitions of their own."""
    configs = [config_of(tmp_path, table_format, surface=s) for s in ("one",) * 3 + tuple("abc")]
    staged = [staged_run(config, f"run{i}") for i, config in enumerate(configs)]
    outcomes = publish_elsewhere(*staged)
    assert outcomes[3:] == ["published"] * 3
    assert set(outcomes) <= {"published", "conflict"}
    assert "published" in outcomes[:3]
    for config, run in zip(configs[3:], staged[3:], strict=True):
        assert_frame_equal(read(config), expected(run))
    rows = read(configs[0])
    winner = next(run for run in staged[:3] if run[0].run_id == rows["run_id"][0])
    assert_frame_equal(rows, expected(winner))


def test_a_reader_never_sees_a_mix_or_a_gap(table_format, tmp_path):
    """20 publishes of two runs in turn, while a reader reads without a pause."""
    config = config_of(tmp_path, table_format)
    pair = [staged_run(config, "a"), staged_run(config, "b", users=9)]
    wanted = {run[0].run_id: expected(run) for run in pair}
    publish_run(*pair[1])
    ended = threading.Event()
    problems: list[BaseException] = []
    seen: list[str] = []

    def look() -> None:
        try:
            while not ended.is_set():
                rows = read(config)
                seen.append(rows["run_id"][0])
                assert_frame_equal(rows, wanted[seen[-1]])
        except BaseException as err:
            problems.append(err)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(20):
        publish_run(*pair[number % 2])
    ended.set()
    reader.join()
    assert not problems, problems
    assert len(set(seen)) == 2, "the reader was never there in time"


def test_the_reader_of_a_parquet_table_starts_again_when_it_was_overtaken(tmp_path, monkeypatch):
    """Deterministic: the files of its pointer are gone when it opens them."""
    config = config_of(tmp_path, "parquet")
    publish(config, "a")
    new = staged_run(config, "b")
    plain, overtaken = files.read_parquet, []

    def slow(path, *more, **named):
        if not overtaken and "/out/" in path:
            overtaken.append(path)
            publish_run(*new)
        return plain(path, *more, **named)

    monkeypatch.setattr("pipelines.publish.parquet.files.read_parquet", slow)
    rows = pl.from_arrow(read_current(str(tmp_path / "out"), DS, "home"))
    assert overtaken
    assert_frame_equal(rows.sort("user_id", "rank"), expected(new))

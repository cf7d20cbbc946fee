"""CASES B and C: what a run publishes, once, after whatever happened before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as pads
import pytest
from polars.testing import assert_frame_equal

from tests.cases.helpers import PARTITION, published, staged, torch_config, with_column, write
from tests.factories import write_config, write_inputs


def part_files(folder: Path) -> list[Path]:
    return sorted((folder / PARTITION).glob("*.parquet"))


def test_a_crash_between_data_and_receipt_leaves_one_row_per_key(nightshelf, tmp_path):
    """C5, ray #61012: a resumed job wrote its last batch again."""
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    summary = nightshelf("run", config, "--output", "json").json
    want = published(tmp_path)
    run = Path(summary["run_dir"])
    for receipt in sorted(run.glob("receipts/*.json"))[:2]:
        receipt.unlink()  # the staged rows are there, the proof is not
    (run / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "out")
    again = nightshelf("run", config, "--output", "json")
    assert "2 of 4 shards are done already" in again.err
    assert len(list(run.glob("staged/*-recommendations.parquet"))) == 6, "two files of no receipt"
    rows = published(tmp_path)
    assert_frame_equal(rows, want)
    assert not rows.select("user_id", "item_id").is_duplicated().any()
    assert not rows.select("user_id", "rank").is_duplicated().any()
    assert again.json["rows_published"] == len(want)


def test_a_beam_of_four_gives_four_rows_per_user(nightshelf, tmp_path):
    """C6, ray #53396: of n beams one row was left. Beam 4, 3 users: 12 ranked rows."""
    write_inputs(tmp_path, num_users=3)
    config = write_config(tmp_path, task={"k": 4, "generate": {"width": 4}})
    nightshelf("run", config)
    rows = published(tmp_path)
    assert rows.select("user_id", "rank").rows() == [
        (user, rank) for user in ("u000", "u001", "u002") for rank in (1, 2, 3, 4)
    ]
    assert not rows.select("user_id", "item_id").is_duplicated().any()
    for user in ("u000", "u001", "u002"):
        assert rows.filter(pl.col("user_id") == user)["score"].is_sorted(descending=True)


def test_publishing_a_date_twice_replaces_its_rows(nightshelf, tmp_path):
    """C7, spark #55622: the second overwrite was appended."""
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    count = (
        f"select count(*), count(distinct user_id || item_id) from '{tmp_path}/out/**/*.parquet'"
    )
    first = nightshelf("run", config, "--output", "json").json
    assert duckdb.sql(count).fetchall() == [(first["rows_published"],) * 2]
    nightshelf("run", config)
    assert duckdb.sql(count).fetchall() == [(first["rows_published"],) * 2]
    # Another cut into shards, with fewer and other files, over the same date.
    other = nightshelf("run", config, "--set", "run.shard_users=1000", "--output", "json").json
    assert other["rows_published"] == first["rows_published"]
    assert duckdb.sql(count).fetchall() == [(first["rows_published"],) * 2]


def test_what_an_attempt_left_half_written_is_in_nobody_s_way(nightshelf, tmp_path):
    """C8, spark #26339 and #24142: the retried task met its own partial file."""
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    summary = nightshelf("run", config, "--output", "json").json
    want = published(tmp_path)
    run = Path(summary["run_dir"])
    names = [p.name for p in part_files(tmp_path)]
    half = b"PAR1 half a file"
    for receipt in run.glob("receipts/*.json"):
        receipt.unlink()
    for path in run.glob("staged/*.parquet"):
        path.write_bytes(half)
    (tmp_path / PARTITION / "_SUCCESS").unlink()
    for path in part_files(tmp_path):
        path.write_bytes(half)
    (tmp_path / PARTITION / f".{names[0]}.0badf00d.tmp").write_bytes(half)
    nightshelf("run", config)
    after = [p.name for p in part_files(tmp_path)]
    assert len(after) == len(names)
    assert_frame_equal(published(tmp_path), want)


def exclude_everything(folder: Path, tables) -> None:
    users, items = (
        pl.from_arrow(tables[name].select([column]))
        for name, column in (("users", "user_id"), ("catalog", "item_id"))
    )
    write(folder, "exclusions", users.join(items, how="cross").to_arrow())


@pytest.mark.parametrize("task", [{"score": {}}, {"generate": {"width": 8}}], ids=lambda t: min(t))
def test_a_rerun_with_nothing_to_say_clears_its_date_and_no_other(nightshelf, tmp_path, task):
    """C10, smart-data-lake #275: a partition without new rows kept its old ones."""
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 5, **task})
    nightshelf("run", config)
    nightshelf("run", config, "--ds", "2026-11-29")
    assert part_files(tmp_path)
    exclude_everything(tmp_path, tables)
    allowed = ("--set", "audit.allow_empty=true", "--output", "json")
    summary = nightshelf("run", config, *allowed).json
    assert (summary["rows_published"], summary["users_without_eligible"]) == (0, 40)
    (empty,) = part_files(tmp_path)
    assert pl.read_parquet(empty).is_empty()
    assert (tmp_path / PARTITION / "_SUCCESS").exists()
    everything = pl.scan_parquet(tmp_path / "out", hive_partitioning=True).collect()
    assert set(everything["ds"].cast(pl.String)) == {"2026-11-29"}
    assert "nothing eligible" in nightshelf("show", config, "--user", "u003").out


def test_an_empty_rerun_can_be_gated_and_then_keeps_the_old_rows(nightshelf, tmp_path):
    """C10: with a gate on coverage the empty result is refused instead."""
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path, audit={"min_coverage": 0.5})
    nightshelf("run", config)
    want = published(tmp_path)
    exclude_everything(tmp_path, tables)
    err = nightshelf("run", config, check=6).err
    assert "coverage is 0, allowed >= 0.5" in err
    assert_frame_equal(published(tmp_path), want)


@pytest.mark.parametrize("surface", ["feed home/eu", "a=b&c", "100%", "50%2F50", "été ü", ".."])
def test_a_surface_is_read_back_as_it_was_written(nightshelf, tmp_path, surface):
    """C15, delta-rs #3939: a partition value with a space or a slash."""
    write_inputs(tmp_path, num_users=6)
    config = write_config(tmp_path, surface=surface)
    nightshelf("run", config)
    root = tmp_path / "out"
    (folder,) = (root / "ds=2026-11-28").iterdir()
    assert [p.parent for p in root.rglob("*.parquet")] == [folder]
    by_polars = pl.scan_parquet(root, hive_partitioning=True).collect()
    types = pa.schema({"ds": pa.string(), "surface": pa.string()})
    by_arrow = pads.dataset(root, partitioning=pads.partitioning(types, flavor="hive")).to_table()
    by_duckdb = duckdb.sql(f"select * from read_parquet('{root}/**/*.parquet', "
                           "hive_partitioning = true, hive_types_autocast = false)")  # fmt: skip
    for rows in (by_polars, pl.from_arrow(by_arrow), by_duckdb.pl()):
        assert rows["surface"].unique().to_list() == [surface]
        assert rows["user_id"].n_unique() == 6
    assert "Title i" in nightshelf("show", config, "--user", "u003").out


def test_a_refused_run_ends_the_process_with_6_and_says_so(nightshelf_process, tmp_path):
    """C25, airflow #49717: a failed job was shown as a success."""
    tables = write_inputs(tmp_path)
    write(tmp_path, "candidates", tables["candidates"].slice(0, 10))
    config = write_config(tmp_path, task={"k": 5, "score": {}}, audit={"min_coverage": 0.9})
    done = nightshelf_process("run", config, "--output", "json", check=6)
    assert done.json["status"] == "failed"
    assert done.json["error"]["exit_code"] == 6
    assert "coverage is 0.25, allowed >= 0.9" in done.err
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").rglob("*.parquet"))


def test_a_failed_shard_publishes_nothing_and_says_which(nightshelf, tmp_path):
    """B6, GRID #24: inference ended quietly, without its merged output."""
    tables = write_inputs(tmp_path)
    moods = ["ok"] * 40
    moods[17] = "no!"
    write(tmp_path, "users", with_column(tables["users"], "mood", moods))
    backend = "tests.cases.backends:raising_backend"
    config = write_config(tmp_path, engine__backend=backend, prompt__template="{mood}{history}")
    done = nightshelf("run", config, "--output", "json", check=4)
    assert "1 of 4 shards failed" in done.err
    assert "the engine met a prompt it cannot bear" in done.err
    assert done.json["error"]["exit_code"] == 4
    assert not (tmp_path / PARTITION).exists()
    (run,) = (p.parent for p in tmp_path.glob("runs/*/plan.json"))
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert len(manifest["failed_shards"]) == 1
    assert len(list(run.glob("receipts/*.json"))) == 3
    moods[17] = "yes"
    write(tmp_path, "users", with_column(tables["users"], "mood", moods))
    summary = nightshelf("run", config, "--output", "json").json
    assert summary["rows_published"] == len(published(tmp_path))
    assert (summary["users_in"], summary["shards_failed"]) == (40, 0)


@pytest.mark.parametrize("task", [{"score": {}}, {"generate": {"width": 8}}], ids=lambda t: min(t))
def test_a_last_batch_of_one_user_is_like_any_other(nightshelf, tmp_path, model_folder, task):
    """C29, spark #39817: 21 rows in batches of 10 failed on the last row."""
    write_inputs(tmp_path, num_users=21)
    config = torch_config(tmp_path, model_folder, task={"k": 5, **task}, run__shard_users=1000)
    rows = []
    for size in (10, 21):
        settings = [f"engine.max_batch_users={size}", f"run.work_dir=runs{size}"]
        args = [a for s in settings for a in ("--set", s)]
        summary = nightshelf("run", config, *args, "--output", "json").json
        assert summary["users_in"] == len(staged(summary, "outcomes")) == 21
        rows.append(published(tmp_path))
    assert_frame_equal(rows[0].drop("score"), rows[1].drop("score"))
    assert_frame_equal(*rows, abs_tol=1e-5, rel_tol=0)
    assert rows[0]["user_id"].n_unique() == 21


def test_the_last_shard_may_have_one_user_or_none(nightshelf, tmp_path):
    """C29: 21 users in shards of about ten, of about one, and of all."""
    write_inputs(tmp_path, num_users=21)
    config = write_config(tmp_path)
    nightshelf("run", config, "--set", "run.shard_users=1000")
    want = published(tmp_path)
    for size in (10, 1):
        summary = nightshelf("run", config, "--set", f"run.shard_users={size}", "--output",
                             "json").json  # fmt: skip
        assert summary["shards"] == -(-21 // size)
        assert_frame_equal(published(tmp_path), want)

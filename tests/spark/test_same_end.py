"""The same input ends the same way with the local launcher and on Spark: exit code and message."""

from __future__ import annotations

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.factories import write_config, write_inputs
from tests.right_or_refused.test_retries import PERMANENT, marked
from tests.spark.helpers import attempts, receipts

ON_SPARK = ("--launcher", "spark")
ON_EXECUTORS = (*ON_SPARK, "--set", "spark.prepare=executors")


def told(done) -> tuple[int, str]:
    """Exit code and message, without the run's id and folder."""
    message = json.loads(done.out.strip().splitlines()[-1])["error"]["message"]
    return done.code, re.sub(r"[0-9a-f]{12}", "ID", message)


@pytest.mark.parametrize("backend", PERMANENT)
def test_what_stays_is_tried_once_and_ends_the_run_as_what_it_is(
    nightshelf, spark, tmp_path, backend
):
    config = marked(tmp_path, backend, run__workers=0)
    local = nightshelf("run", config, "--output", "json", check=PERMANENT[backend])
    for receipt in tmp_path.glob("runs/*/receipts/*.json"):
        receipt.unlink()
    done = nightshelf("run", config, *ON_SPARK, "--output", "json", check=None)
    assert told(done) == told(local)
    tried = [a for a in attempts(tmp_path) if a["failure"] is not None]
    assert len(tried) == 1
    assert len(receipts(tmp_path)) < 5


def test_a_panic_fails_its_shard_and_the_others_are_done(nightshelf, spark, tmp_path):
    config = marked(tmp_path, "panic")
    done = nightshelf("run", config, *ON_SPARK, check=4)
    assert "1 of 5 shards failed" in done.err
    assert "index out of bounds" in done.err
    assert len(receipts(tmp_path)) == 4


def damaged(path) -> None:
    """Pages that cannot be decoded, behind a footer that is whole."""
    data = bytearray(path.read_bytes())
    table = pq.ParquetFile(path)
    first = table.metadata.row_group(0).column(0)
    start = first.dictionary_page_offset or first.data_page_offset
    data[start : start + first.total_compressed_size] = b"\xff" * first.total_compressed_size
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["users", "candidates", "exclusions"])
def test_a_damaged_file_is_named_wherever_it_is_read(nightshelf, spark, tmp_path, name):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    damaged(tmp_path / f"{name}.parquet")
    local = nightshelf("run", config, "--output", "json", check=3)
    done = nightshelf("run", config, *ON_EXECUTORS, "--output", "json", check=None)
    assert told(done) == told(local)
    assert f"{name}.parquet" in told(done)[1]


def test_a_type_that_no_prompt_can_have_is_the_same_refusal(nightshelf, spark, tmp_path):
    tables = write_inputs(tmp_path)
    wide = pa.array([1] * len(tables["users"]), pa.decimal256(50, 2))
    pq.write_table(tables["users"].append_column("wide", wide), tmp_path / "users.parquet")
    config = write_config(tmp_path, prompt__template="{text:wide}{history}{user_vector}")
    local = nightshelf("run", config, "--output", "json", check=None)
    done = nightshelf("run", config, *ON_EXECUTORS, "--output", "json", check=None)
    assert local.code in (0, 3)
    if local.code:
        assert told(done) == told(local)
    else:
        assert done.code == 0

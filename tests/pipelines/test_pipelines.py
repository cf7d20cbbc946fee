from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.auditing.audit import audit_run
from pipelines.catalog.build import Catalog, is_saved, open_catalog, read_catalog, read_codes
from pipelines.inputs.prepare import prepare_run, shard_of
from pipelines.inputs.shard_columns import ROW, first_row
from pipelines.planning.plan import plan_run
from pipelines.shards.rank import rank_batch
from pipelines.shards.run_shard import load_receipt
from pipelines.sources import input_files
from pipelines.sources.input_columns import Piece, Wanted, scan_columns
from pipelines.storage import files
from schemas.config_file import load_config
from schemas.errors import CatalogError, StorageError, TableError
from schemas.requests import BatchResult, ItemScores, Ragged, SidBeams
from schemas.tables import EXCLUDED_LIST
from tests.factories import random_codes, sid_space, write_config, write_inputs

# What Spark 4.3.0 answers to `select xxhash64(user_id), pmod(xxhash64(user_id), 7)`.
SPARK = {
    "": (-7444071767201028348, 3),
    "u0": (-4918730982607498257, 2),
    "007": (4253822561066836160, 4),
    "42": (-4744849287861989057, 4),
    "user-12345": (8477891451949575594, 1),
    "ünïcödé-用户": (4597085377748193888, 5),
    "a" * 40: (-8273737738657618755, 4),
}


def test_a_user_is_in_the_shard_where_spark_would_put_it():
    assert shard_of(list(SPARK), 7).tolist() == [shard for _, shard in SPARK.values()]
    assert shard_of(list(SPARK), 1).tolist() == [0] * len(SPARK)
    assert shard_of([None], 7).tolist() == [3]


# --- files ----------------------------------------------------------------------------------------


def test_hidden_and_temporary_files_are_not_inputs(tmp_path):
    table = pa.table({"a": [1]})
    names = """b.parquet a.parquet _temporary/x.parquet .c.parquet _d.parquet
        archive/e.parquet .staging/f.parquet _SUCCESS"""
    for name in names.split():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(table, path)
        else:
            path.touch()
    found = input_files.list_parquet(str(tmp_path), "users")
    assert [str(Path(f).relative_to(tmp_path)) for f in found] == [
        "a.parquet", "archive/e.parquet", "b.parquet",
    ]  # fmt: skip
    assert input_files.list_parquet(str(tmp_path / "a*.parquet"), "users") == [found[0]]
    assert input_files.list_parquet(found[0], "users") == [found[0]]


def test_listings_are_fresh_on_file_systems_that_cache():
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.makedirs("/fresh", exist_ok=True)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), sink)
    content = sink.getvalue().to_pybytes()
    fs.pipe_file("/fresh/a.parquet", content)
    assert len(input_files.list_parquet("memory://fresh", "users")) == 1
    fs.pipe_file("/fresh/b.parquet", content)
    assert len(input_files.list_parquet("memory://fresh", "users")) == 2
    described, schema = input_files.describe_file("memory://fresh/b.parquet", "users")
    assert described.rows == 1
    assert schema.names == ["a"]


def test_a_write_that_fails_leaves_neither_the_file_nor_a_trace(tmp_path):
    target = tmp_path / "x.json"
    files.write_bytes(str(target), b"old")
    with (
        pytest.raises(StorageError, match="could not be written: got .*No space left"),
        files.atomic_target(str(target)) as path,
    ):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(("failures", "calls"), [(2, 3), (99, 5)])
def test_a_store_that_is_busy_is_asked_again_and_not_for_ever(failures, calls, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda s: None)
    asked = []

    @files.retried
    def read():
        asked.append(1)
        if len(asked) <= failures:
            raise OSError("503 Slow Down")
        return "ok"

    if failures < 5:
        assert read() == "ok"
    else:
        with pytest.raises(OSError, match="503"):
            read()
    assert len(asked) == calls


def test_a_missing_file_is_not_asked_for_again(tmp_path):
    with pytest.raises(StorageError, match="cannot be read"):
        files.read_parquet(str(tmp_path / "no.parquet"))


def test_row_groups_are_bounded_by_bytes(tmp_path):
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(40_000 * 1024, np.float32)), 1024)
    files.write_parquet(str(tmp_path / "v.parquet"), pa.table({"v": vectors}))
    meta = pq.ParquetFile(tmp_path / "v.parquet").metadata
    assert meta.num_row_groups >= 2
    assert meta.row_group(0).num_rows * 1024 * 4 <= 80 << 20


# --- catalog --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", ["codes", "fixed", "large", "tokens", "text", "spaced", "dictionary"]
)
def test_every_form_of_a_semantic_id_gives_the_same_codes(form):
    space = sid_space()
    codes = random_codes(np.random.default_rng(0), 20, ragged=form not in ("fixed",))
    rows = [[c for c in row if c >= 0] for row in codes.tolist()]
    tokens = [[space.token(lv, c) for lv, c in enumerate(row)] for row in rows]
    column = {
        "codes": lambda: pa.array(rows, pa.list_(pa.uint8())),
        "fixed": lambda: pa.array(rows, pa.list_(pa.int64(), 3)),
        "large": lambda: pa.array(rows, pa.large_list(pa.int16())),
        "tokens": lambda: pa.array(tokens),
        "text": lambda: pa.array(["".join(t) for t in tokens]),
        "spaced": lambda: pa.array([" ".join(t) for t in tokens]),
        "dictionary": lambda: (
            pa.array(["".join(t) for t in tokens]).dictionary_encode().cast(pa.string())
        ),
    }[form]()
    ids = pa.array([f"i{i}" for i in range(20)])
    np.testing.assert_array_equal(read_codes(column, ids, space), codes)


def test_a_token_of_another_level_is_refused():
    with pytest.raises(CatalogError, match="a token like <b_0> at level 2, got '<c_1>'"):
        read_codes(pa.array([["<a_1>", "<c_1>"]]), pa.array(["x"]), sid_space())


def test_a_catalog_is_ordered_by_item_id_and_opens_as_it_was_saved(tmp_path):
    table = pa.table(
        {"item_id": ["b", "c", "a"], "sid": [[0, 0, 1], [0, 0, 0], [0, 0, 0]], "title": list("BCA")}
    )
    pq.write_table(table, tmp_path / "c.parquet")
    catalog = read_catalog([str(tmp_path / "c.parquet")], sid_space())
    assert catalog.item_ids.to_pylist() == ["a", "b", "c"]
    assert catalog.table.column("catalog_row").to_pylist() == [2, 0, 1]
    assert catalog.trie.sid_of_item.tolist() == [0, 1, 0]
    assert not is_saved(str(tmp_path / "saved"))
    catalog.save(str(tmp_path / "saved"))
    opened = open_catalog(str(tmp_path / "saved"))
    assert opened.table.equals(catalog.table)
    assert opened.positions(pa.array(["c", "x", None, "a"])).tolist() == [2, -1, -1, 0]
    assert opened.popularity.tolist() == [0, 0, 0]


def test_a_column_that_one_file_of_a_catalog_lacks_is_null_there(tmp_path):
    pq.write_table(pa.table({"item_id": ["a"], "sid": [[0]]}), tmp_path / "a.parquet")
    other = pa.table({"item_id": ["b"], "sid": pa.array([[1]], pa.large_list(pa.int8()))})
    pq.write_table(other.append_column("title", pa.array(["B"])), tmp_path / "b.parquet")
    paths = [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    items = read_catalog(paths, sid_space((5,))).table
    assert items["item_id"].to_pylist() == ["a", "b"]
    assert items["title"].to_pylist() == [None, "B"]


def test_files_of_a_catalog_write_their_columns_in_one_type(tmp_path):
    pq.write_table(pa.table({"item_id": ["a"], "sid": [[0]]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"item_id": ["b"], "sid": [["<a_0>"]]}), tmp_path / "b.parquet")
    paths = [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    with pytest.raises(TableError, match="'sid' changes its type between files") as found:
        read_catalog(paths, sid_space((5,)))
    assert all(path in str(found.value) for path in paths)


# --- rank -----------------------------------------------------------------------------------------


def small_catalog() -> Catalog:
    """Items 0 to 5; items 1, 2 and 4 share a SID; `catalog_row` is the reverse order."""
    from engine.trees.sid_trie import build_trie

    codes = np.asarray([[1, 0], [0, 0], [0, 0], [2, 0], [0, 0], [3, 0]], dtype=np.int32)
    table = pa.table(
        {
            "item_id": list("abcdef"),
            "catalog_row": [5, 4, 3, 2, 1, 0],
            "popularity": [0.0, 1.0, 9.0, 0.0, 9.0, 0.0],
        }
    )
    return Catalog(table, build_trie(codes))


def result(scored=(), beams=(), *, users=1, pruned=-np.inf, failed=()):
    def arrays(rows, *types):
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(types)
        return [np.asarray(c, dtype=t) for c, t in zip(columns, types, strict=True)]

    su, si, ss = arrays(scored, np.int64, np.int64, np.float32)
    bu, bs, bc = arrays(beams, np.int64, np.int64, np.float32)
    zeros = np.zeros(users, dtype=np.int64)
    return BatchResult(
        num_users=users,
        scored=ItemScores(user=su, item=si, score=ss) if scored else None,
        generated=SidBeams(
            user=bu, sid=bs, score=bc,
            pruned=np.full(users, pruned, dtype=np.float32),
            legal_mass=np.ones(users, dtype=np.float32), width=zeros,
        ) if beams else None,
        failed=np.isin(np.arange(users), failed),
        rows=zeros,
        rows_naive=zeros,
    )  # fmt: skip


def ranked(res, *, k=10, collisions="all", excluded=None):
    out = rank_batch(
        res,
        small_catalog(),
        excluded or Ragged.empty(res.num_users),
        k=np.full(res.num_users, k),
        collisions=collisions,
    )
    return list(zip(out.user.tolist(), out.rank.tolist(), out.item.tolist(), strict=True)), out


def test_ties_go_to_the_smaller_sid_and_then_to_the_smaller_item_id():
    rows, _ = ranked(result([(0, i, -1.0) for i in (5, 4, 3, 2, 1, 0)]))
    assert [item for _, _, item in rows] == [1, 2, 4, 0, 3, 5]


def test_all_items_of_a_generated_sid_share_its_score_and_count_against_k():
    rows, out = ranked(result(beams=[(0, 0, -1.0), (0, 1, -2.0)]), k=3)
    assert rows == [(0, 1, 1), (0, 2, 2), (0, 3, 4)]
    assert set(out.score.tolist()) == {-1.0}


@pytest.mark.parametrize(
    ("policy", "excluded", "item"),
    [
        ("most_popular", [], 2),  # 2 and 4 are as popular: the smaller id
        ("most_popular", [2], 4),
        ("most_popular", [2, 4], 1),
        ("first", [], 4),  # the first row of the catalog table
        ("first", [4], 2),
    ],
)
def test_one_item_per_sid_is_chosen_among_those_left(policy, excluded, item):
    rows, _ = ranked(
        result(beams=[(0, 0, -1.0)]), collisions=policy, excluded=Ragged.from_lists([excluded])
    )
    assert rows == [(0, 1, item)]


def test_an_item_both_scored_and_generated_stands_once_as_scored():
    rows, out = ranked(result([(0, 3, -2.0), (0, 1, -1.0)], [(0, 0, -1.0), (0, 3, -5.0)]))
    assert [item for _, _, item in rows] == [1, 2, 4, 3, 5]
    assert out.source.tolist() == [0, 1, 1, 0, 1]


def test_the_certificate_needs_the_kth_score_above_what_was_dropped():
    beams = [(0, 1, -1.0), (0, 2, -2.0)]
    for k, pruned, exact in (
        (2, -2.5, True),
        (2, -2.0, False),  # a tie proves nothing
        (2, -1.5, False),
        (3, -9.0, False),  # fewer than k, and something was dropped
        (3, -np.inf, True),  # fewer than k, but that is all there is
    ):
        assert ranked(result(beams=beams, pruned=pruned), k=k)[1].exact.tolist() == [exact]


def test_nothing_of_a_failed_user_is_ranked():
    rows, out = ranked(
        result([(0, 0, np.nan), (0, 3, -1.0), (1, 3, -1.0)], users=3, failed=[0]), k=2
    )
    assert rows == [(1, 1, 3)]
    assert out.returned.tolist() == [0, 1, 0]


# --- audit ----------------------------------------------------------------------------------------


@pytest.fixture
def finished(nightshelf, tmp_path):
    """A run with its receipts, to be tampered with."""
    write_inputs(tmp_path)
    path = write_config(tmp_path)
    nightshelf("run", path)
    plan = plan_run(load_config(path))
    shards = prepare_run(plan)
    return plan, [load_receipt(plan, shard) for shard in shards]


def tampered(plan, receipt, change):
    staged = Path(plan.run_dir) / receipt.files["recommendations"].path
    change(pl.read_parquet(staged)).write_parquet(staged)


def refused(plan, receipts):
    return {gate.gate for gate in audit_run(plan, receipts).refused} - {"staged_files"}


def test_a_right_run_passes_every_gate(finished):
    report = audit_run(*finished)
    assert not report.refused
    assert {gate.gate for gate in report.gates} == {
        "conservation", "staged_files", "not_empty", "duplicates", "ranks", "scores",
        "catalog_validity", "excluded_items", "ineligible_items", "rows", "coverage",
        "quarantine_rate", "rows_min", "rows_p5", "exact_share", "legal_mass", "score_drift",
        "overlap", "row_change",
        "unknown_history", "history_rows", "distinct_lists",
    }  # fmt: skip


SCORE = pl.col("score")


@pytest.mark.parametrize(
    ("gates", "change"),
    [
        ({"rows"}, lambda t: t.head(-1)),
        ({"duplicates", "rows", "ranks"}, lambda t: pl.concat([t, t.tail(1)])),
        ({"ranks"}, lambda t: t.with_columns(pl.col("rank") + 1)),
        ({"scores"}, lambda t: t.with_columns(-SCORE)),
        ({"scores"}, lambda t: t.with_columns(SCORE * float("nan"))),
        ({"scores"}, lambda t: t.with_columns(SCORE.reverse().over("user_id"))),
        ({"catalog_validity"}, lambda t: t.with_columns(pl.col("item_id") + "x")),
    ],
    ids=["lost row", "doubled row", "rank gap", "positive", "nan", "order", "unknown item"],
)
def test_each_gate_sees_its_fault(finished, gates, change):
    plan, receipts = finished
    tampered(plan, receipts[1], change)
    assert refused(plan, receipts) == gates


def test_an_excluded_item_is_seen(finished):
    plan, receipts = finished
    shard = pl.read_parquet(Path(plan.run_dir) / "shards" / "shard-00002.parquet")
    user, items = (
        shard.filter(pl.col(EXCLUDED_LIST).list.len() > 0).select("user_id", EXCLUDED_LIST).row(0)
    )

    def change(table):
        mine = (pl.col("user_id") == user) & (pl.col("rank") == 1)
        return table.with_columns(
            pl.when(mine).then(pl.lit(items[0])).otherwise("item_id").alias("item_id")
        )

    tampered(plan, receipts[2], change)
    assert "excluded_items" in refused(plan, receipts)


def test_a_lost_user_or_shard_breaks_conservation(finished):
    plan, receipts = finished
    assert "conservation" in refused(plan, receipts[:-1])
    counts = receipts[0].counts.model_copy(update={"users_in": 3, "users_recommended": 3})
    changed = receipts[0].model_copy(update={"counts": counts})
    assert "conservation" in refused(plan, [changed, *receipts[1:]])


def test_rows_are_numbered_beyond_what_a_row_index_counts(tmp_path):
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [7, 8]}), path)
    wanted = [Wanted("a", "a", pa.int64())]
    rows = scan_columns("users", [Piece(path, first_row(5))], wanted, numbers=ROW).collect()
    assert rows[ROW].to_list() == [5 * 2**40, 5 * 2**40 + 1]
    assert first_row(0) == 0
    assert first_row(1) > 2**32

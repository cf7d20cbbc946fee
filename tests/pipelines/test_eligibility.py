from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.trees.exclusions import EligibleTrie, dead_nodes
from engine.trees.sid_trie import build_trie
from pipelines.inputs.eligibility import eligible_items
from schemas.eligibility import attributes, parse_eligibility, user_columns
from schemas.errors import ConfigError
from schemas.requests import Eligibility, Ragged
from tests.factories import random_codes, write_config, write_inputs

PARTITION = "out/ds=2026-11-28/surface=home"
ITEMS = [
    {"market": ["se", "de"], "age": 7, "adult": False, "kind": "show"},
    {"market": ["us"], "age": 18, "adult": True, "kind": "film"},
    {"market": [], "age": None, "adult": False, "kind": "film"},
    {"market": ["de", "us"], "age": 12, "adult": None, "kind": None},
]
CATALOG = pa.Table.from_pylist(ITEMS)


@pytest.mark.parametrize(
    ("rule", "users", "want"),
    [
        ("market contains {user.m}", {"m": ["de", "us", "xx"]}, ["1001", "0101", "0000"]),
        ("age <= {user.max} and not adult", {"max": [12, 99]}, ["1000", "1000"]),
        ("adult", {}, ["0100"]),
        ("not adult", {}, ["1010"]),  # an item of unknown age or kind matches nothing
        ("kind = 'film' or age > 6", {}, ["1111"]),
        ("kind in ['show', 'clip']", {}, ["1000"]),
        ("kind not in {user.bad}", {"bad": [["film"], ["show", "film"]]}, ["1000", "0000"]),
        ("(kind = 'film' or kind = 'show') and age != 7", {}, ["0100"]),
        ("not (age < 10 or adult = true)", {}, ["0000"]),
    ],
)
def test_rules_mean_what_they_say(rule, users, want):
    expression = parse_eligibility(rule)
    table = pa.table(users) if users else pa.table({"user_id": ["u"]})
    got = eligible_items(expression, table, CATALOG)
    rows = ["".join("01"[int(v)] for v in got.eligible[s]) for s in got.segment]
    assert rows == want


def test_a_segment_is_evaluated_once_however_many_users_it_has():
    expression = parse_eligibility("market contains {user.m}")
    got = eligible_items(expression, pa.table({"m": ["de", "us"] * 500}), CATALOG)
    assert got.eligible.shape == (2, 4)
    assert got.segment.tolist() == [0, 1] * 500


def test_names_are_found_in_the_expression():
    expression = parse_eligibility("a contains {user.x} and (b or not c < {user.y}) and a = 'q'")
    assert attributes(expression) == ("a", "b", "c")
    assert user_columns(expression) == ("x", "y")


@pytest.mark.parametrize(
    "bad", ["", "market contains", "and adult", "age <", "(adult", "age ~ 3", "a in [1, 2", "a b"]
)
def test_rules_that_cannot_be_read_are_refused(bad):
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_eligibility(bad)


@given(st.integers(0, 10_000), st.integers(2, 40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_dead_and_alive_nodes_are_those_of_the_items_that_are_left(seed, num_items, ragged):
    rng = np.random.default_rng(seed)
    trie = build_trie(random_codes(rng, num_items, ragged=ragged))
    eligibility = Eligibility(rng.integers(0, 3, 4), rng.random((3, num_items)) < 0.5)
    excluded = Ragged.from_lists(rng.choice(num_items, num_items // 2) for _ in range(4))
    segments = EligibleTrie(trie, eligibility.eligible)
    dead = set(dead_nodes(trie, excluded, eligibility, segments).tolist())
    for user in range(4):
        allowed = set(np.flatnonzero(eligibility.eligible[eligibility.segment[user]]).tolist())
        left = set()
        for item in allowed - set(excluded.row(user).tolist()):
            node = int(trie.node_of_sid[trie.sid_of_item[item]])
            while node >= 0:
                left.add(node)
                node = int(trie.parent[node])
        alive = segments.alive[eligibility.segment[user]]
        for node in range(1, trie.num_nodes):
            may_enter = alive[node] and user * trie.num_nodes + node not in dead
            assert may_enter == (node in left)


def setting(tmp_path, **changes):
    tables = write_inputs(tmp_path, num_users=30)
    rng = np.random.default_rng(5)
    markets = [[m for m in ("se", "de", "us") if rng.random() < 0.4] for _ in range(60)]
    catalog = tables["catalog"].append_column("market", pa.array(markets, pa.list_(pa.string())))
    catalog = catalog.append_column("age", pa.array(rng.integers(0, 18, 60)))
    users = tables["users"].append_column("country", pa.array(["se", "de", "us"] * 10))
    users = users.append_column("max_age", pa.array([6, 12, 18, 12, 18] * 6))
    pq.write_table(catalog, tmp_path / "catalog.parquet")
    pq.write_table(users, tmp_path / "users.parquet")
    rule = "market contains {user.country} and age <= {user.max_age}"
    config = write_config(tmp_path, task__eligibility=rule, **changes)
    who = users.to_pylist()
    may = {
        u["user_id"]: {
            item["item_id"]
            for item in catalog.to_pylist()
            if u["country"] in item["market"] and item["age"] <= u["max_age"]
        }
        for u in who
    }
    return config, may


@pytest.mark.parametrize("task", ["generate", "score", "both"])
def test_a_run_gives_what_is_eligible_and_all_of_it(nightshelf, tmp_path, task):
    tasks = {"generate": {"width": 64}} if task != "score" else {}
    tasks |= {"score": {}} if task != "generate" else {}
    config, may = setting(tmp_path, task={"k": 60, **tasks})
    nightshelf("run", config, "--set", "task.eligibility=null")
    free = pl.read_parquet(tmp_path / PARTITION)
    args = ("--set", "task.eligibility=market contains {user.country} and age <= {user.max_age}")
    summary = nightshelf("run", config, *args, "--output", "json").json
    rows = pl.read_parquet(tmp_path / PARTITION)
    for user, items in may.items():
        mine = set(rows.filter(pl.col("user_id") == user)["item_id"])
        everything = set(free.filter(pl.col("user_id") == user)["item_id"])
        assert mine == everything & items
    joined = rows.join(free, on=["user_id", "item_id"], how="left")
    assert (joined["score"] == joined["score_right"]).all(), "no other item's score changed"
    assert summary["users_in"] == 30
    if task == "generate":
        assert rows["exact"].all()


def test_wrong_names_and_types_are_told_before_any_work(nightshelf, tmp_path):
    config, _ = setting(tmp_path, task__generate__width=8)

    def plan(rule, check):
        return nightshelf("plan", config, "--set", f"task.eligibility={rule}", check=check).err

    assert "users: column 'land' is missing" in plan("market contains {user.land}", 3)
    assert "catalog: column 'makret' is missing" in plan("makret contains {user.country}", 3)
    assert "compares what cannot be compared" in plan("age contains {user.country}", 2)
    assert "compares what cannot be compared" in plan("age < {user.country}", 2)
    assert "cannot be read" in plan("age <", 2)


def test_a_user_whose_segment_is_unknown_is_quarantined(nightshelf, tmp_path):
    config, _ = setting(tmp_path, task__generate__width=8)
    users = pq.read_table(tmp_path / "users.parquet")
    countries = users.column("country").to_pylist()
    countries[4] = None
    at = users.schema.get_field_index("country")
    pq.write_table(users.set_column(at, "country", pa.array(countries)), tmp_path / "users.parquet")
    args = ("--set", "task.eligibility=market contains {user.country}")
    assert nightshelf("run", config, *args, "--output", "json").json["users_quarantined"] == 1
    assert "rule null_slot" in nightshelf("show", config, "--user", "u004").out

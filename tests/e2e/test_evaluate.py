"""`nightshelf evaluate` over whole runs: what the lists are worth, against a count by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytrec_eval

from tests.factories import write_config, write_inputs

KS = (1, 3, 5)
TASKS = {
    "score": {"score": {}},
    "generate": {"generate": {"width": 60}},
    "both": {"score": {}, "generate": {"width": 60}},
}


def write_truth(folder: Path, users, items, seed: int = 0, name: str = "truth") -> pl.DataFrame:
    """Some users' later items, long, with weights 1 to 4."""
    rng = np.random.default_rng(seed)
    rows = [
        (user, item, int(rng.integers(1, 5)))
        for user in users
        for item in rng.choice(items, rng.integers(1, 12), replace=False).tolist()
    ]
    truth = pl.DataFrame(rows, ["user_id", "item_id", "weight"], orient="row")
    truth.write_parquet(folder / f"{name}.parquet")
    return truth


def evaluate(nightshelf, target, folder: Path, *args, check=0):
    truth = folder / "truth.parquet"
    return nightshelf("evaluate", target, "--truth", truth, *args, "--output", "json", check=check)


def values(metrics):
    return {name: cell["value"] for name, cell in metrics.items()}


def by_trec_eval(lists: dict, truth: pl.DataFrame, k: int) -> dict[str, float]:
    """trec_eval's means over all users of the truth; those without a list are 0."""
    qrels: dict = {}
    for user, item, weight in truth.iter_rows():
        qrels.setdefault(str(user), {})[str(item)] = weight
    runs = {
        str(user): {str(item): -float(rank) for rank, item in enumerate(items[:k])}
        for user, items in lists.items()
    }
    names = {f"recall.{k}", f"ndcg_cut.{k}", f"map_cut.{k}", f"success.{k}", "recip_rank"}
    found = pytrec_eval.RelevanceEvaluator(qrels, names).evaluate(runs)
    ours = {"recall": "recall", "ndcg": "ndcg_cut", "map": "map_cut", "hit_rate": "success"}
    means = {
        f"{mine}@{k}": sum(one.get(f"{name}_{k}", 0.0) for one in found.values()) / len(qrels)
        for mine, name in ours.items()
    }
    means[f"mrr@{k}"] = sum(one.get("recip_rank", 0.0) for one in found.values()) / len(qrels)
    return means


def published_lists(folder: Path) -> dict:
    rows = pl.read_parquet(folder / "out", hive_partitioning=False).sort("user_id", "rank")
    return dict(rows.group_by("user_id", maintain_order=True).agg("item_id").iter_rows())


def most_popular(tables, generated: bool, k: int) -> dict:
    """Each user's most popular allowed items, one user at a time."""
    catalog = pl.from_arrow(tables["catalog"]).sort(
        -pl.col("popularity"), "item_id", maintain_order=True
    )
    excluded: dict = {}
    for user, item in pl.from_arrow(tables["exclusions"]).iter_rows():
        excluded.setdefault(user, set()).add(item)
    out = {}
    for user, candidates in pl.from_arrow(tables["candidates"]).iter_rows():
        allowed = [
            item
            for item in catalog["item_id"]
            if item not in excluded.get(user, ()) and (generated or item in candidates)
        ]
        out[user] = allowed[:k]
    return out


@pytest.mark.parametrize("int_ids", [False, True], ids=["string ids", "int64 ids"])
@pytest.mark.parametrize("task", TASKS)
def test_a_run_and_its_popularity_baseline_are_judged_as_trec_eval_does(
    nightshelf, tmp_path, task, int_ids
):
    tables = write_inputs(tmp_path, int_ids=int_ids)
    config = write_config(tmp_path, task={"k": 5, **TASKS[task]})
    nightshelf("run", config)
    users = tables["users"].column("user_id").to_pylist()
    items = tables["catalog"].column("item_id").to_pylist()
    strangers = [9000, 9001] if int_ids else ["x1", "x2"]
    truth = write_truth(tmp_path, [*users[:30], *strangers], items)
    found = evaluate(nightshelf, config, tmp_path, "--k", "1,3,5").json
    lists = published_lists(tmp_path)
    assert found["users"] == {
        "with_truth": 32,
        "in_run": 30,
        "with_list": len(set(lists) & set(users[:30])),
        "without_truth": 10,
        "coverage": len(set(lists) & set(users[:30])) / 32,
    }
    popular = most_popular(tables, "generate" in TASKS[task], 5)
    for k in KS:
        for method, theirs in (("run", lists), ("popularity", popular)):
            ours = values(found["methods"][method])
            for name, value in by_trec_eval(theirs, truth, k).items():
                assert ours[name] == pytest.approx(value, abs=1e-12), (method, name)
        shown = {i for u in users[:30] for i in lists.get(u, [])[:k]}
        assert found["methods"]["run"][f"coverage@{k}"]["value"] == len(shown) / len(items)
    assert found["popularity_from"] == "catalog"


def test_what_could_have_been_recommended_bounds_the_recall(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 15, "score": {}})
    nightshelf("run", config)
    items = tables["catalog"].column("item_id").to_pylist()
    truth = write_truth(tmp_path, tables["users"].column("user_id").to_pylist(), [*items, "gone"])
    found = evaluate(nightshelf, config, tmp_path, "--k", "15").json
    # k is as long as any candidate list: everything reachable is in the list.
    lists = published_lists(tmp_path)
    hits = sum(item in lists.get(user, ()) for user, item, _ in truth.iter_rows())
    assert found["truth"]["pairs_reachable"] == hits > 0
    assert found["truth"]["pairs"] == len(truth)
    assert found["truth"]["pairs_unknown"] == truth.filter(item_id="gone").height > 0


@pytest.mark.parametrize("layout", ["long", "wide"])
def test_eligibility_and_the_layout_of_the_output_change_nothing_in_how_it_is_judged(
    nightshelf, tmp_path, layout
):
    tables = write_inputs(tmp_path)
    catalog = tables["catalog"].append_column("market", pa.array([f"s{i % 3}" for i in range(60)]))
    pq.write_table(catalog, tmp_path / "catalog.parquet")
    task = {"k": 5, "generate": {"width": 60}, "eligibility": "market = {user.segment}"}
    config = write_config(tmp_path, task=task, output__layout=layout)
    nightshelf("run", config)
    segment = dict(pl.from_arrow(tables["users"]).select("user_id", "segment").iter_rows())
    market = dict(pl.from_arrow(catalog).select("item_id", "market").iter_rows())
    excluded = set(pl.from_arrow(tables["exclusions"]).iter_rows())
    truth = write_truth(tmp_path, list(segment), list(market))
    found = evaluate(nightshelf, config, tmp_path).json
    could = [
        market[item] == segment[user] and (user, item) not in excluded
        for user, item, _ in truth.iter_rows()
    ]
    assert found["truth"]["pairs_reachable"] == sum(could)
    best = {}
    order = pl.from_arrow(catalog).sort(-pl.col("popularity"), "item_id")["item_id"]
    for user in segment:
        allowed = [i for i in order if market[i] == segment[user] and (user, i) not in excluded]
        best[user] = allowed[:5]
    expected = by_trec_eval(best, truth, 5)
    ours = values(found["methods"]["popularity"])
    assert {n: ours[n] for n in expected} == pytest.approx(expected, abs=1e-12)


def test_long_and_wide_truth_say_the_same(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    items = tables["catalog"].column("item_id").to_pylist()
    truth = write_truth(tmp_path, ["u001", "u002", "u030"], items).drop("weight")
    truth.write_parquet(tmp_path / "truth.parquet")
    long = evaluate(nightshelf, config, tmp_path).json
    wide = truth.group_by("user_id").agg(pl.col("item_id").alias("item_ids"))
    wide.write_parquet(tmp_path / "truth.parquet")
    assert evaluate(nightshelf, config, tmp_path).json["methods"] == long["methods"]


def test_segments_are_the_users_of_a_column_and_add_up(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 5, "generate": {"width": 60}})
    nightshelf("run", config)
    users = tables["users"].column("user_id").to_pylist()
    items = tables["catalog"].column("item_id").to_pylist()
    truth = write_truth(tmp_path, [*users, "stranger"], items)
    found = evaluate(nightshelf, config, tmp_path, "--by", "segment").json
    segments = {one["segment"]: one for one in found["segments"]}
    assert set(segments) == {"s0", "s1", "s2", None}
    assert segments[None]["users"] == 1
    assert segments[None]["methods"]["run"]["recall@5"]["value"] == 0
    lists = published_lists(tmp_path)
    of = dict(pl.from_arrow(tables["users"]).select("user_id", "segment").iter_rows())
    for name in ("s0", "s1", "s2"):
        mine = {user: items for user, items in lists.items() if of[user] == name}
        part = truth.filter(pl.col("user_id").is_in([u for u in users if of[u] == name]))
        ours = values(segments[name]["methods"]["run"])
        expected = by_trec_eval(mine, part, 5)
        assert {n: ours[n] for n in expected} == pytest.approx(expected, abs=1e-12)
    total = sum(
        one["users"] * one["methods"]["run"]["ndcg@5"]["value"] for one in segments.values()
    )
    assert total / 41 == pytest.approx(found["methods"]["run"]["ndcg@5"]["value"], abs=1e-12)


def test_intervals_come_from_the_seed_and_hold_the_mean(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    items = tables["catalog"].column("item_id").to_pylist()
    write_truth(tmp_path, tables["users"].column("user_id").to_pylist(), items)
    first, again, other, none = (
        evaluate(nightshelf, config, tmp_path, *args).json
        for args in (["--seed", "3"], ["--seed", "3"], ["--seed", "4"], ["--bootstrap", "0"])
    )
    assert first == again
    cell = first["methods"]["run"]["recall@5"]
    assert cell["low"] < cell["value"] < cell["high"]
    assert cell != other["methods"]["run"]["recall@5"]
    assert none["methods"]["run"]["recall@5"] == {"value": cell["value"], "low": None, "high": None}
    # The random lists are drawn anew with another seed.
    assert first["methods"]["random"] != other["methods"]["random"]
    difference = first["differences"]["popularity"]["recall@5"]["value"]
    popular = first["methods"]["popularity"]["recall@5"]["value"]
    assert difference == pytest.approx(cell["value"] - popular, abs=1e-12)


def test_popularity_is_counted_from_past_interactions_or_not_known(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    pq.write_table(tables["catalog"].drop_columns(["popularity"]), tmp_path / "catalog.parquet")
    config = write_config(tmp_path, task={"k": 5, "generate": {"width": 60}})
    nightshelf("run", config)
    users = tables["users"].column("user_id").to_pylist()
    items = tables["catalog"].column("item_id").to_pylist()
    truth = write_truth(tmp_path, users, items)
    blind = evaluate(nightshelf, config, tmp_path)
    assert set(blind.json["methods"]) == {"run", "random"}
    assert blind.json["methods"]["run"]["novelty@5"]["value"] is None
    text = nightshelf("evaluate", config, "--truth", tmp_path / "truth.parquet").out
    assert "popularity is not known" in text
    assert "novelty@5" not in text
    train = pl.DataFrame({"user_id": users[:3], "item_id": ["i007", "i007", "i031"]})
    train.write_parquet(tmp_path / "train.parquet")
    found = evaluate(nightshelf, config, tmp_path, "--train", tmp_path / "train.parquet").json
    counts = pa.array([{"i007": 2, "i031": 1}.get(item, 0) for item in items])
    tables["catalog"] = tables["catalog"].set_column(2, "popularity", counts)
    expected = by_trec_eval(most_popular(tables, True, 5), truth, 5)
    ours = values(found["methods"]["popularity"])
    assert {n: ours[n] for n in expected} == pytest.approx(expected, abs=1e-12)


def test_rows_of_the_truth_that_do_not_count_are_counted(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    pl.DataFrame(
        {
            "user_id": ["u001", "u001", "u001", None, "u002", "u003"],
            "item_id": ["i001", "i001", "i002", "i001", None, "i004"],
            "relevance": [1, 3, 0, 1, 1, 2],
        }
    ).write_parquet(tmp_path / "truth.parquet")
    found = evaluate(nightshelf, config, tmp_path).json
    truth = found["truth"]
    counted = ("rows", "rows_null", "rows_weightless", "rows_repeated", "pairs")
    assert [truth[name] for name in counted] == [6, 2, 1, 1, 2]
    assert found["users"]["with_truth"] == 2
    text = nightshelf("evaluate", config, "--truth", tmp_path / "truth.parquet").out
    assert "2 null, 1 of weight 0, 1 repeated" in " ".join(text.split())


def test_an_older_run_is_judged_by_its_folder_and_a_configuration_by_what_is_published(
    nightshelf, tmp_path
):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 5, "generate": {"width": 60}})
    first = nightshelf("run", config, "--output", "json").json
    second = nightshelf("run", config, "--set", "engine.seed=8", "--output", "json").json
    items = tables["catalog"].column("item_id").to_pylist()
    write_truth(tmp_path, tables["users"].column("user_id").to_pylist(), items)
    old = evaluate(nightshelf, first["run_dir"], tmp_path).json
    new = evaluate(nightshelf, config, tmp_path).json
    assert (old["run_id"], new["run_id"]) == (first["run_id"], second["run_id"])
    assert old["methods"]["run"] != new["methods"]["run"]
    assert old["methods"]["popularity"] == new["methods"]["popularity"]
    err = evaluate(nightshelf, first["run_dir"], tmp_path, "--ds", "2026-11-27", check=2).err
    assert "--ds and --set are for a configuration" in err


# --- what cannot be judged ------------------------------------------------------------------------


@pytest.fixture
def ran(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    return config


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        ({"user": ["u001"], "item_id": ["i001"]}, "none of the known shapes"),
        ({"user_id": ["u001"], "item_id": [1.5]}, "column 'item_id' has the wrong type"),
        ({"user_id": [1], "item_id": ["i001"]}, "user_id has another type than the run's"),
        ({"user_id": ["u001"], "item_ids": [[7]]}, "item_ids has another type than the run's"),
        ({"user_id": ["nobody"], "item_id": ["i001"]}, "no user of the truth is in the run"),
        ({"user_id": ["u001"], "item_id": ["nothing"]}, "no item of the truth is in the run's"),
        ({"user_id": ["u001"], "item_id": ["i001"], "weight": [-1.0]}, "a weight is no weight"),
        ({"user_id": ["u001"], "item_id": ["i001"], "weight": [None]}, "a weight is no weight"),
        ({"user_id": ["u001"], "item_id": ["i001"], "weight": [0]}, "nothing is relevant"),
        (
            {"user_id": ["u001"], "item_id": ["i001"], "weight": [1], "relevance": [1]},
            "two columns say how relevant",
        ),
        (pa.table({"user_id": pa.array([], pa.string()), "item_id": pa.array([], pa.string())}),
         "nothing is relevant"),
    ],
)  # fmt: skip
def test_a_truth_that_cannot_be_used_is_refused_in_words(nightshelf, tmp_path, ran, truth, words):
    if isinstance(truth, dict):
        truth = pa.table(
            {n: pa.array(v, pa.float64() if v == [None] else None) for n, v in truth.items()}
        )
    pq.write_table(truth, tmp_path / "truth.parquet")
    err = evaluate(nightshelf, ran, tmp_path, check=3).err
    assert words in err
    assert "truth.parquet" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--k", "6"], "--k 6 cannot be measured: expected 1 to 5"),
        (["--k", "0"], "--k 0 cannot be measured"),
        (["--k", "five"], "--k is no list of numbers"),
        (["--by", "segmnt"], "has no column 'segmnt'"),
    ],
)
def test_a_question_that_has_no_answer_is_refused(nightshelf, tmp_path, ran, args, words):
    write_truth(tmp_path, ["u001"], ["i001", "i002"] * 6)
    assert words in evaluate(nightshelf, ran, tmp_path, *args, check=2).err


def test_a_run_without_lists_or_without_all_its_rows_is_not_judged(nightshelf, tmp_path, ran):
    write_truth(tmp_path, ["u001"], [f"i{n:03d}" for n in range(12)])
    run_dir = next(tmp_path.glob("runs/*-home-*"))
    next(run_dir.glob("staged/*-recommendations.parquet")).unlink()
    err = evaluate(nightshelf, run_dir, tmp_path, check=4).err
    assert "not every shard is scored: got 3 of 4" in err
    assert "does not exist" in evaluate(nightshelf, tmp_path / "x.yaml", tmp_path, check=2).err
    vectors = write_config(tmp_path, surface="vectors", task={"embed": {}}, output={"path": "v"})
    nightshelf("run", vectors)
    err = evaluate(nightshelf, vectors, tmp_path, check=2).err
    assert "the run has no lists: got task.embed" in err


@pytest.mark.parametrize("shape", ["segment", "shared"])
def test_candidates_that_users_share_are_the_pool_of_the_baselines(nightshelf, tmp_path, shape):
    tables = write_inputs(tmp_path)
    items = tables["catalog"].column("item_id").to_pylist()
    of = dict(pl.from_arrow(tables["users"]).select("user_id", "segment").iter_rows())
    sets = {"s0": items[:20], "s1": items[10:15], "s2": items[30:]}
    if shape == "segment":
        candidates = pa.table({"segment": list(sets), "item_ids": list(sets.values())})
    else:
        candidates, sets = pa.table({"item_id": items[:25]}), dict.fromkeys(sets, items[:25])
    pq.write_table(candidates, tmp_path / "candidates.parquet")
    config = write_config(tmp_path, task={"k": 5, "score": {}})
    nightshelf("run", config)
    truth = write_truth(tmp_path, list(of), items)
    found = evaluate(nightshelf, config, tmp_path).json
    excluded = set(pl.from_arrow(tables["exclusions"]).iter_rows())
    could = [i in sets[of[u]] and (u, i) not in excluded for u, i, _ in truth.iter_rows()]
    assert found["truth"]["pairs_reachable"] == sum(could)
    order = pl.from_arrow(tables["catalog"]).sort(-pl.col("popularity"), "item_id")["item_id"]
    best = {
        user: [i for i in order if i in sets[segment] and (user, i) not in excluded][:5]
        for user, segment in of.items()
    }
    expected = by_trec_eval(best, truth, 5)
    ours = values(found["methods"]["popularity"])
    assert {n: ours[n] for n in expected} == pytest.approx(expected, abs=1e-12)


def test_a_baseline_gives_a_user_no_more_items_than_the_run_may(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    users = tables["users"].append_column("wanted", pa.array([u % 5 + 1 for u in range(40)]))
    pq.write_table(users, tmp_path / "users.parquet")
    task = {"k": 5, "k_column": "wanted", "generate": {"width": 60}}
    config = write_config(tmp_path, task=task)
    nightshelf("run", config)
    names = tables["users"].column("user_id").to_pylist()
    truth = write_truth(tmp_path, names, tables["catalog"].column("item_id").to_pylist())
    found = evaluate(nightshelf, config, tmp_path, "--k", "5").json
    popular = most_popular(tables, True, 5)
    best = {user: items[: u % 5 + 1] for u, (user, items) in enumerate(popular.items())}
    expected = by_trec_eval(best, truth, 5)
    ours = values(found["methods"]["popularity"])
    assert {n: ours[n] for n in expected} == pytest.approx(expected, abs=1e-12)


def test_a_run_that_recommended_nothing_is_worth_nothing(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    items = tables["catalog"].column("item_id").to_pylist()
    names = tables["users"].column("user_id").to_pylist()
    everything = pl.DataFrame({"user_id": names}).join(
        pl.DataFrame({"item_id": items}), how="cross"
    )
    everything.write_parquet(tmp_path / "exclusions.parquet")
    config = write_config(tmp_path, audit={"allow_empty": True})
    run_dir = nightshelf("run", config, "--output", "json").json["run_dir"]
    write_truth(tmp_path, names, items)
    found = evaluate(nightshelf, config, tmp_path).json
    assert found["users"]["with_list"] == found["truth"]["pairs_reachable"] == 0
    for method, metrics in found["methods"].items():
        assert metrics["recall@5"]["value"] == metrics["coverage@5"]["value"] == 0, method
        assert metrics["novelty@5"]["value"] is None
    nothing = nightshelf("compare", run_dir, run_dir, "--output", "json").json
    assert nothing["users"]["a"] == nothing["items"]["a"] == 0
    assert nothing["agreement"]["rbo"] is None
    assert "no item in common" in nightshelf("compare", run_dir, run_dir).out
    err = nightshelf("compare", run_dir, run_dir, "--min-overlap", "0.1", check=6).err
    assert "overlap is not known" in err


def test_a_column_of_too_many_values_is_refused(nightshelf, tmp_path, ran, monkeypatch):
    names = [f"u{n:03d}" for n in range(40)]
    write_truth(tmp_path, names, [f"i{n:03d}" for n in range(60)])
    assert len(evaluate(nightshelf, ran, tmp_path, "--by", "user_id").json["segments"]) == 40
    monkeypatch.setattr("pipelines.evaluation.evaluate._MOST_SEGMENTS", 39)
    err = evaluate(nightshelf, ran, tmp_path, "--by", "user_id", check=2).err
    assert "--by user_id has too many values: expected at most 39 with 60 items" in err


def test_a_user_that_only_the_engine_refused_has_no_list_in_the_baselines_either(
    nightshelf, tmp_path
):
    """A prompt that does not fit is found when it is built, after the shard was read."""
    tables = write_inputs(tmp_path)
    bios = ["short"] * 39 + ["far too long " * 60]
    pq.write_table(tables["users"].append_column("bio", pa.array(bios)), tmp_path / "users.parquet")
    config = write_config(
        tmp_path,
        prompt={"template": "{text:bio} {history}", "max_tokens": 60},
        audit={"max_quarantine_rate": 1.0},
    )
    assert nightshelf("run", config, "--output", "json").json["users_quarantined"] == 1
    items = tables["catalog"]["item_id"].to_pylist()
    truth = pa.table({"user_id": ["u039", "u000"], "item_ids": [items, items]})
    pq.write_table(truth, tmp_path / "truth.parquet")
    found = evaluate(nightshelf, config, tmp_path, "--k", "1").json
    assert found["users"]["with_list"] == 1
    for method in ("run", "popularity", "random"):
        assert values(found["methods"][method])["hit_rate@1"] == 0.5, method

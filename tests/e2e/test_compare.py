"""`nightshelf compare` over whole runs: nothing differs from itself, and what differs is found."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from tests.factories import write_config, write_inputs

WIDE = {"k": 5, "generate": {"width": 60}}


def compare(nightshelf, a, b, *args, check=0):
    return nightshelf("compare", a, b, *args, "--output", "json", check=check)


def run_dirs(nightshelf, folder: Path, *changes: tuple[str, ...]) -> list[str]:
    """One run per tuple of `--set` values, over the same inputs."""
    config = write_config(folder, task=WIDE)
    dirs = []
    for number, sets in enumerate(changes):
        day = f"2026-11-{number + 10}"
        args = [x for one in sets for x in ("--set", one)]
        dirs.append(
            nightshelf("run", config, "--ds", day, *args, "--output", "json").json["run_dir"]
        )
    return dirs


def rows_of(run_dir: str) -> pl.DataFrame:
    paths = sorted(Path(run_dir).glob("staged/*-recommendations.parquet"))
    return pl.concat(pl.read_parquet(path) for path in paths)


@pytest.mark.parametrize("int_ids", [False, True], ids=["string ids", "int64 ids"])
def test_a_run_is_all_ones_against_itself(nightshelf, tmp_path, int_ids):
    write_inputs(tmp_path, int_ids=int_ids)
    (run,) = run_dirs(nightshelf, tmp_path, ())
    found = compare(nightshelf, run, run, "--by", "segment", "--min-overlap", "1", "--min-rbo", "1",
                    "--min-tau", "1", "--max-score-shift", "0", "--max-item-churn", "0",
                    "--max-users-lost", "0").json  # fmt: skip
    assert found["status"] == "compared"
    ones = {
        "overlap": {"1": 1.0, "5": pytest.approx(1, abs=1e-12)},
        "rbo": pytest.approx(1, abs=1e-12),
        "tau": pytest.approx(1, abs=1e-12),
    }
    for part in (found, *found["segments"]):
        assert {name: part["agreement"][name] for name in ones} == ones
        users = part["users"]
        assert users["a"] == users["b"] == users["both"] == users["same_list"] > 0
        assert users["gained"] == users["lost"] == 0
    shift = found["score_shift"]
    assert [shift[n] for n in ("mean", "median", "mean_abs", "max_abs")] == [0, 0, 0, 0]
    assert found["items"]["churn"] == found["items"]["exposure_shift"] == 0
    assert [s["segment"] for s in found["segments"]] == ["s0", "s1", "s2"]
    assert len(found["gates"]) == 6
    assert all(gate["passed"] for gate in found["gates"])


def test_the_number_of_shards_changes_nothing(nightshelf, tmp_path):
    write_inputs(tmp_path)
    four, one = run_dirs(nightshelf, tmp_path, (), ("run.shard_users=100",))
    for a, b in ((four, one), (one, four)):
        found = compare(nightshelf, a, b, "--by", "segment").json
        assert found["users"]["same_list"] == found["users"]["both"] == 40
        assert found["agreement"]["rbo"] == pytest.approx(1, abs=1e-12)
        assert sum(s["users"]["same_list"] for s in found["segments"]) == 40


def test_two_models_are_compared_as_by_hand(nightshelf, tmp_path):
    write_inputs(tmp_path)
    a, b = run_dirs(nightshelf, tmp_path, (), ("engine.seed=5", "run.shard_users=13"))
    found = compare(nightshelf, a, b).json
    one, other = rows_of(a), rows_of(b)
    pairs = one.join(other, on=["user_id", "item_id"], suffix="_b")
    overlap = {
        k: pairs.filter(pl.max_horizontal("rank", "rank_b") <= k).height / k / 40 for k in (1, 5)
    }
    assert found["agreement"]["overlap"] == {
        str(k): pytest.approx(share, abs=1e-12) for k, share in overlap.items()
    }
    shift = pairs["score_b"].cast(pl.Float64) - pairs["score"].cast(pl.Float64)
    assert found["score_shift"] == {
        "pairs": len(pairs),
        "mean": pytest.approx(shift.mean(), abs=1e-12),
        "median": pytest.approx(shift.median(), abs=1e-12),
        "mean_abs": pytest.approx(shift.abs().mean(), abs=1e-12),
        "max_abs": pytest.approx(shift.abs().max(), abs=1e-12),
    }
    mine, theirs = set(one["item_id"]), set(other["item_id"])
    items = found["items"]
    assert (items["gained"], items["lost"]) == (len(theirs - mine), len(mine - theirs))
    assert items["churn"] == pytest.approx(len(mine ^ theirs) / len(mine | theirs))
    counts = [frame["item_id"].value_counts() for frame in (one, other)]
    joined = counts[0].join(counts[1], on="item_id", how="full", coalesce=True).fill_null(0)
    moved = (joined["count"] / len(one) - joined["count_right"] / len(other)).abs().sum() / 2
    assert items["exposure_shift"] == pytest.approx(moved, abs=1e-12)


def test_users_gained_and_lost_are_counted_for_each_segment(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    (a,) = run_dirs(nightshelf, tmp_path, ())
    users = pl.from_arrow(tables["users"])
    newcomer = users.head(2).with_columns(
        pl.Series("user_id", ["n1", "n2"]), pl.Series("segment", ["s1", "new"])
    )
    users.slice(3).vstack(newcomer).write_parquet(tmp_path / "later.parquet")
    config = write_config(tmp_path, task=WIDE, inputs__users="later.parquet")
    b = nightshelf("run", config, "--output", "json").json["run_dir"]
    found = compare(nightshelf, a, b, "--by", "segment").json
    counts = ("a", "b", "both", "gained", "lost")
    assert [found["users"][n] for n in counts] == [40, 39, 37, 2, 3]
    segments = {s["segment"]: [s["users"][n] for n in counts] for s in found["segments"]}
    # u000, u001 and u002 are of s0, s1 and s2: those that B lost are known from A's users table.
    assert segments == {
        "s0": [14, 13, 13, 0, 1],
        "s1": [13, 13, 12, 1, 1],
        "s2": [13, 12, 12, 0, 1],
        "new": [0, 1, 0, 1, 0],
    }
    refused = compare(nightshelf, a, b, "--max-users-lost", "0.05", check=6)
    assert "users_lost is 0.075, allowed <= 0.05" in refused.err


@pytest.mark.parametrize(
    ("limit", "gate"),
    [
        (("--min-overlap", "0.9"), "overlap"),
        (("--min-rbo", "0.9"), "rbo"),
        (("--min-tau", "0.9"), "tau"),
        (("--max-score-shift", "0.1"), "score_shift"),
        (("--max-item-churn", "0"), "item_churn"),
    ],
)
def test_a_limit_that_does_not_hold_ends_with_exit_code_6(nightshelf, tmp_path, limit, gate):
    write_inputs(tmp_path, num_items=80)
    a, b = run_dirs(nightshelf, tmp_path, (), ("engine.seed=5",))
    done = compare(nightshelf, a, b, *limit, check=6)
    found, error = (json.loads(line) for line in done.out.strip().splitlines())
    assert found["status"] == "refused"
    assert [g["gate"] for g in found["gates"] if not g["passed"]] == [gate]
    assert error["error"]["kind"] == "comparison"
    text = nightshelf("compare", a, b, *limit, check=6).out
    assert f"REFUSED: {gate}" in text


def test_scores_of_two_norms_are_not_compared_and_no_limit_on_them_holds(nightshelf, tmp_path):
    write_inputs(tmp_path)
    a, b = run_dirs(nightshelf, tmp_path, (), ("task.score_norm=level",))
    found = compare(nightshelf, a, b).json
    assert found["score_shift"] is None
    assert found["agreement"]["rbo"] > 0
    done = compare(nightshelf, a, b, "--max-score-shift", "9", check=6)
    assert "score_shift is not known" in done.err
    assert "their scores" not in done.err
    assert "not measured" in nightshelf("compare", a, b).out


def test_a_text_comparison_can_be_read(nightshelf, tmp_path):
    write_inputs(tmp_path)
    a, b = run_dirs(nightshelf, tmp_path, (), ("engine.seed=5",))
    text = nightshelf("compare", a, b, "--by", "segment", "--k", "2").out
    for words in ("40 in A, 40 in B, 40 in both", "overlap@2", "Kendall tau-b", "exposure shift"):
        assert words in text


def test_runs_that_cannot_be_compared_are_refused_in_words(nightshelf, tmp_path):
    write_inputs(tmp_path / "a")
    write_inputs(tmp_path / "b", int_ids=True)
    (a,) = run_dirs(nightshelf, tmp_path / "a", ())
    (b,) = run_dirs(nightshelf, tmp_path / "b", ())
    err = compare(nightshelf, a, b, check=2).err
    assert "the runs' user_id differ in type" in err
    assert "no run is in this folder" in compare(nightshelf, a, tmp_path, check=4).err
    assert "--k 6 cannot be measured" in compare(nightshelf, a, a, "--k", "6", check=2).err
    assert "no column 'x'" in compare(nightshelf, a, a, "--by", "x", check=2).err


def test_a_shorter_list_decides_how_deep_lists_are_compared_by_default(nightshelf, tmp_path):
    write_inputs(tmp_path)
    a, b = run_dirs(nightshelf, tmp_path, (), ("task.k=3",))
    for one, other in ((a, b), (b, a)):
        found = compare(nightshelf, one, other).json
        assert found["k"] == [1, 3]
        assert found["agreement"]["overlap"]["3"] == 1

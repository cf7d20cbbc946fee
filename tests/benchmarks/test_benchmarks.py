"""The benchmarks measure what they say: same answers, right arithmetic, all figures there."""

from __future__ import annotations

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.__main__ import arguments
from benchmarks.answers import AnswersDiffer, check_scores
from benchmarks.cases import Case, Sizes, make_cases
from benchmarks.checkpoint import make_checkpoint
from benchmarks.compare import compare
from benchmarks.contenders import PEERS, Contender
from benchmarks.limit import Limit
from benchmarks.linear_packing import LinearPacking
from benchmarks.ours import Ours
from benchmarks.pipeline import Tables, overhead_of, run_tables
from benchmarks.report import RATIOS, cost_per_million
from benchmarks.table import show
from benchmarks.vllm_client import VLLM, PeerError
from benchmarks.watched import Passes
from benchmarks.workload import make_workload
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.prepacked import plain
from jobs.cli.bench import BENCH_CONTEXT, bench

TINY = [
    "--model", "tiny", "--dtype", "float32", "--device", "cpu", "--no-pipeline", "--layers", "1",
    "--codes", "6", "--items", "120", "--many-items", "150", "--candidates", "30",
    "--few-candidates", "10", "--history-tokens", "21", "--short-tokens", "9", "--long-min", "30",
    "--long-max", "40", "--soft-tokens", "14", "--soft-users", "3", "--width", "12", "--narrow",
    "4", "--wide", "20", "--vllm-width", "8", "--k", "5", "--sample", "7", "--repeats", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return make_checkpoint(folder, name="tiny", layers=2, codes=6, dtype="float32", seed=0)


@pytest.fixture(scope="module")
def backend(checkpoint):
    import torch

    return TorchBackend(checkpoint.folder, "float32", torch.device("cpu"))


@pytest.fixture(scope="module")
def scoring(checkpoint):
    case = Case(name="c", task="score", tokens=(5, 17), users=3, candidates=40, items=100)
    return make_workload(case, checkpoint, "cpu", seed=1)


@pytest.mark.parametrize("max_rows", [8192, 37], ids=["one pass", "many passes"])
def test_linear_packing_scores_as_the_engine_does(scoring, backend, max_rows):
    linear = LinearPacking(
        backend, scoring.packed_prompts, scoring.candidate_tokens, max_rows=max_rows
    )
    want = Ours(scoring, backend)().scores
    np.testing.assert_allclose(linear().numpy(), want, atol=1e-5, rtol=0)


def test_linear_packing_forwards_every_token_and_a_delimiter_per_item(scoring, backend):
    linear = LinearPacking(backend, scoring.packed_prompts, scoring.candidate_tokens)
    assert linear.rows == scoring.prompt_codes.offsets[-1] + 3 * 40 * (3 + 1)


def test_answers_that_differ_are_refused(scoring, backend):
    answer = Ours(scoring, backend)()
    check = check_scores(scoring, "resend", answer.scores[:, :4], answer)
    assert check["largest_difference_nats"] == 0.0
    wrong = answer.scores[:, :4].copy()
    wrong[1, 2] += 0.01
    with pytest.raises(AnswersDiffer, match="c, resend: scores differ by up to 0.01"):
        check_scores(scoring, "resend", wrong, answer)
    wrong[1, 2] = np.nan
    with pytest.raises(AnswersDiffer, match="nan"):
        check_scores(scoring, "resend", wrong, answer)


def test_the_time_of_a_sample_is_multiplied_by_its_share():
    contender = Contender("resend", lambda: 2.0, rows=None, sampled=(16, 200))
    contender.take_turn()
    assert contender.seconds == [2.0 * 200 / 16]
    whole = Contender("linear", lambda: 2.0, rows=None)
    whole.take_turn()
    assert whole.seconds == [2.0]


def test_a_million_users_cost_their_seconds_at_the_hourly_price():
    assert cost_per_million(users_per_s=100, price_per_hour=3.6) == pytest.approx(10.0)


def test_overhead_leaves_out_what_every_run_pays_once():
    few = {"seconds": 9.0, "engine_seconds": 1.0}
    many = {"seconds": 112.0, "engine_seconds": 100.0}
    assert overhead_of(few, many) == {"start_s": 8.0, "overhead": pytest.approx(0.04)}


def test_the_limit_counts_the_matmuls_of_the_rows_and_columns_that_are_read(backend):
    model = backend._model
    passes = Passes(prefill=[(10, 3)], tree=[3, 4], head=[(5, 82), (2, 6)])
    limit = Limit(model, passes)
    hidden, intermediate, queries, keys = 32, 64, 4 * 8, 2 * 8
    kept = hidden * 2 * keys  # k, v
    layer = kept + hidden * (2 * queries + 3 * intermediate)  # and q, o, gate, up, down
    flops = limit.flops()
    assert flops["prefill"] == 2 * (layer * 10 + kept * 10 + (layer - kept) * 3)  # two layers
    assert flops["tree"] == 2 * 2 * layer * 7
    assert flops["head"] == 2 * hidden * (5 * 82 + 2 * 6)
    assert flops["whole"] == flops["prefill"] + flops["tree"] + flops["head"]
    assert set(limit()) == {"prefill", "tree", "head", "whole"}


def test_the_stricter_limit_multiplies_the_same_and_lays_each_weight_out_once(backend):
    passes = Passes(prefill=[(10, 3)], tree=[3, 4], head=[(5, 82), (2, 6)])
    laid, multiplied = [], []

    def prepack(weight, bias):
        laid.append(weight)

        def layer(x):
            multiplied.append(2 * len(x) * weight.numel())
            return plain(weight, bias)(x)

        return layer

    limit = Limit(backend._model, passes, prepack)
    once = len(laid)
    multiplied.clear()
    limit()
    assert len(laid) == once == 2 * 7 + 2, "two layers of seven, and the head's two widths"
    assert sum(multiplied) == limit.flops()["whole"]


def test_cases_have_names_of_their_own_and_known_peers():
    for given in ([], ["--quick"], ["--width", "64"]):
        cases = make_cases(arguments(given).sizes)
        assert len({case.name for case in cases}) == len(cases)
        assert {peer for case in cases for peer in case.peers} == set(PEERS)


def test_every_size_is_a_flag():
    given = arguments(["--history-tokens", "77", "--quick"]).sizes
    assert given.history_tokens == 77
    assert given.layers < Sizes().layers


def test_more_candidates_than_items_are_refused(capsys):
    with pytest.raises(SystemExit):
        arguments(["--candidates", "50", "--items", "20"])
    assert "more candidates than --items" in capsys.readouterr().err


@pytest.fixture(scope="module")
def report():
    return compare(arguments(TINY), None)


def test_the_document_has_every_figure_and_null_for_what_was_not_run(report):
    report = json.loads(json.dumps(report))
    assert set(report["ratios"]) == set(RATIOS)
    run = {key for key, value in report["ratios"].items() if value is not None}
    assert run == {"score_vs_resend", "score_vs_hf_shared", "score_vs_linear", "beam_vs_hf"}
    assert set(report["mfu"]) == {"history", "soft_token", "long"}
    assert all(value > 0 for value in report["mfu"].values())
    assert set(report["mfu_laid_out"].values()) == {None}, "float32 has no other layout"
    assert report["pipeline_overhead"] is None
    assert report["peak_memory_ratio"] is None
    assert {"pipeline", "vLLM"} <= set(report["not_run"])
    assert {"cpu", "threads", "torch", "dtype"} <= set(report["machine"])
    assert "1 of 2 layers" in report["model"]
    for case in report["cases"]:
        assert set(case["phases"]) == {"prefill", "tree", "head", "selection"}
        assert {"mfu", "gflops_per_s"} <= set(case["phases"]["head"])
        assert case["contenders"][0]["cost_per_million_users"] > 0
        assert len(case["checks"]) == len(case["contenders"]) - 1


def test_a_sampled_peer_says_so(report):
    scored = next(case for case in report["cases"] if case["checks"])
    sampled = {one["name"]: one["sampled"] for one in scored["contenders"]}
    assert sampled == {"ours": None, "resend": "7 of 30", "hf_shared": None, "linear": None}


def test_the_table_shows_it(report, capsys):
    show(report)
    out = capsys.readouterr().out
    assert "linear multi-item packing" in out
    assert "not run: vLLM: --vllm was not given" in out


def test_vllm_without_its_environment_is_left_out(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.vllm_client.ENVIRONMENT", tmp_path)
    with pytest.raises(PeerError, match="make bench-vllm"):
        VLLM(checkpoint, max_tokens=10, max_width=2)


def test_the_pipeline_is_run_as_a_user_runs_it():
    summary = run_tables(Tables(users=12, items=50, codes=4), {"backend": "fake"}, shard_users=6)
    assert summary["users"] == 12
    assert summary["peak_rss_mib"] > 10
    assert summary["seconds"] >= summary["engine_seconds"] >= 0


def test_nightshelf_bench_passes_options_on(capfd):
    app = typer.Typer()
    app.command(context_settings=BENCH_CONTEXT)(bench)
    assert CliRunner().invoke(app, ["--quick", "--", "--help"]).exit_code == 0
    assert "--history-tokens" in capfd.readouterr().out
    assert CliRunner().invoke(app, ["--no-such-option"]).exit_code == 2

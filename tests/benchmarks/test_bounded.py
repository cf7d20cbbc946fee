"""The benchmark of the search: contenders give the same lists, and its model is sharpened."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks.bounded import figures_of, main
from benchmarks.sharpened import Sharpened
from engine.backends.fake.backend import FakeBackend
from engine.decoding import Decoding
from engine.generate.beam_search import search_by_beams
from engine.generate.search import search
from engine.trees.device_trie import to_device
from engine.trees.sid_trie import build_trie
from schemas.settings import GenerateSettings
from tests.factories import bound_space, prompts_of, random_codes


@pytest.mark.parametrize("alpha", [1.0, 5.0])
def test_contenders_search_one_distribution_over_the_catalog(alpha):
    trie = build_trie(random_codes(np.random.default_rng(0), 90))
    index = to_device(trie, bound_space(), "full_vocab", torch.device("cpu"))
    sharp = Sharpened(FakeBackend(), index, alpha)
    context = sharp.prefill(prompts_of([[1, 2], [3]]), 0)
    decoding = Decoding(sharp, context, index)
    every = trie.num_sids
    found, _, work = search(decoding, GenerateSettings(exact=True), widths=(64,) * 3, k=every)
    assert np.exp(found.score).reshape(2, every).sum(axis=1) == pytest.approx([1, 1], abs=1e-4)
    wide, _, _ = search_by_beams(decoding, GenerateSettings(), widths=(4096,) * 3, k=every)
    assert wide.sid.tolist() == found.sid.tolist()
    assert figures_of(found, work, every)[2] == 1.0


def test_figures_of_a_tiny_shape(tmp_path, capsys):
    main(
        ["--model", "tiny", "--layers", "1", "--dtype", "float32", "--codes", "8", "--items", "300",
         "--users", "2", "--prompt", "9", "--alpha", "5", "--repeats", "1",
         "--json", str(tmp_path / "out.json")]
    )  # fmt: skip
    report = json.loads((tmp_path / "out.json").read_text())
    names = [row["contender"] for row in report["rows"]]
    assert names == ["beam 64", "beam 128", "best first (auto)", "all candidates", "best first"]
    assert all(row["exact"] == 1.0 for row in report["rows"] if "best first" in row["contender"])
    assert all(row["seconds"] > 0 and row["ratio"] > 0 for row in report["rows"])
    assert len(next(iter(report["perplexity"].values()))) == 3
    assert "ratio: a contender's median time over the first one's" in capsys.readouterr().out

"""What a model does not answer is a failed row, never "nothing eligible"; and an answer of another
count than was asked for belongs to nobody.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from engine.backends.checked import checked
from engine.backends.fake.backend import FakeBackend
from engine.decoding import Decoding
from engine.engine import open_engine
from engine.generate.beam_search import beam_search
from engine.scoring.items import score_in_parts
from engine.trees.device_trie import to_device
from engine.trees.sid_trie import build_trie
from schemas.errors import ConfigError, EngineError
from schemas.requests import UNSCORED, Ragged
from schemas.settings import EngineSettings, RunConfig
from tests.cases.test_runs import exclude_everything
from tests.factories import (
    SIZES,
    bound_space,
    prompts_of,
    random_codes,
    random_prompts,
    write_config,
    write_inputs,
)
from tests.right_or_refused import answering_backends as backends

HERE = "tests.right_or_refused.answering_backends"
PARTITION = "out/ds=2026-11-28/surface=home"
TASKS = {
    "score": {"score": {}},
    "generate": {"generate": {"width": 8}},
    "both": {"score": {}, "generate": {"width": 8}},
    "label": {"label": {"labels": ["y", "n"]}},
    "raw labels": {"label": {"labels": ["y", "n"], "softmax": False}},
}


def staged(folder: Path, kind: str) -> pl.DataFrame:
    return pl.concat(pl.read_parquet(p) for p in folder.glob(f"runs/*/staged/*-{kind}.parquet"))


@pytest.mark.parametrize("dead", backends.DEAD)
@pytest.mark.parametrize("task", TASKS)
def test_a_model_that_gives_no_score_replaces_nothing(nightshelf, tmp_path, task, dead):
    if dead == "logits" and task == "label":
        pytest.skip("the softmax over the labels is ours, whatever stands below")
    write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 5, **TASKS[task]})
    nightshelf("run", config)
    want = pl.read_parquet(tmp_path / PARTITION)
    config = write_config(
        tmp_path, task={"k": 5, **TASKS[task]}, engine__backend=f"{HERE}:{dead}",
        run__work_dir="dead/runs",
    )  # fmt: skip
    err = nightshelf("run", config, check=6).err
    assert "quarantine_rate" in err and "not_empty" in err
    assert_frame_equal(pl.read_parquet(tmp_path / PARTITION), want)
    quarantined = staged(tmp_path / "dead", "quarantine").filter(pl.col("table") == "users")
    assert set(quarantined["rule"]) == {"score_not_finite"}
    assert len(quarantined) == 40
    assert staged(tmp_path / "dead", "outcomes").is_empty()


def test_a_second_label_without_a_score_is_noticed(nightshelf, tmp_path):
    for name, labels in (("first", ["y", "n"]), ("second", ["n", "y"])):
        folder = tmp_path / name
        write_inputs(folder)
        config = write_config(
            folder, engine__backend=f"{HERE}:no_y",
            task={"k": 5, "label": {"labels": labels, "softmax": False}},
        )  # fmt: skip
        nightshelf("run", config, check=6)


@pytest.mark.parametrize("task", [{"score": {}}, {"generate": {"width": 8}}], ids=lambda t: min(t))
def test_a_partition_is_emptied_only_when_that_is_allowed(nightshelf, tmp_path, task):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 5, **task})
    nightshelf("run", config)
    want = pl.read_parquet(tmp_path / PARTITION)
    exclude_everything(tmp_path, tables)
    err = nightshelf("run", config, check=6).err
    assert "not_empty is 0, allowed >= 1" in err
    assert_frame_equal(pl.read_parquet(tmp_path / PARTITION), want)
    done = nightshelf("run", config, "--set", "audit.allow_empty=true", "--output", "json").json
    assert done["rows_published"] == 0
    assert pl.read_parquet(tmp_path / PARTITION).is_empty()


def test_a_first_run_without_a_row_is_refused_too(nightshelf, tmp_path):
    exclude_everything(tmp_path, write_inputs(tmp_path))
    nightshelf("run", write_config(tmp_path), check=6)
    assert not (tmp_path / PARTITION).exists()


def test_a_short_list_says_whether_the_model_or_the_catalog_ended_it(nightshelf, tmp_path):
    write_inputs(tmp_path)
    changes = {
        "engine__backend": f"{HERE}:some_tokens_dead", "task": {"k": 60, "generate": {"width": 64}},
    }  # fmt: skip
    nightshelf("run", write_config(tmp_path, **changes))
    outcomes = staged(tmp_path, "outcomes")
    assert set(outcomes["reason"]) == {"model_gave_no_score"}
    assert not outcomes["exact"].any()
    assert (outcomes["returned"] > 0).all()
    whole = write_config(tmp_path, **changes | {"engine__backend": "fake", "run__work_dir": "w"})
    nightshelf("run", whole)
    outcomes = pl.concat(pl.read_parquet(p) for p in tmp_path.glob("w/*/staged/*-outcomes.parquet"))
    assert set(outcomes["reason"]) == {"catalog_exhausted"}
    assert outcomes["exact"].all()


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sets(st.integers(20, 20 + sum(SIZES) - 1), max_size=14),
    st.integers(1, 12),
    st.sampled_from([2, 5, 100]),
    st.booleans(),
)
def test_beams_hold_what_the_model_scores_and_say_what_it_does_not(seed, dead, k, width, ragged):
    """Against all items scored one by one: -inf of the model never looks like a mask of ours."""
    rng = np.random.default_rng(seed)
    trie = build_trie(random_codes(rng, 30, ragged=ragged))
    index = to_device(trie, bound_space(), "full_vocab", torch.device("cpu"))
    backend = checked(backends.Without(tuple(dead)))
    prompts = random_prompts(rng, 4)
    context = backend.prefill(prompts_of(prompts), 1000)
    masked = rng.random((4, trie.num_nodes)) < 0.2
    for node in range(trie.num_nodes - 1, -1, -1):  # one without an item left below it is too
        children = slice(int(trie.first_child[node]), int(trie.first_child[node + 1]))
        if children.stop > children.start:
            masked[:, node] |= masked[:, children].all(axis=1)
    keys = np.flatnonzero(masked.reshape(-1)).astype(np.int64)
    beams = beam_search(
        Decoding(backend, context, index),
        prompts=torch.arange(4), widths=(width,) * trie.depth, k=k,
        dead=torch.from_numpy(keys),
    )  # fmt: skip
    first = trie.items[trie.first_item[:-1]].astype(np.int64)  # an item of each SID
    every = Ragged.from_lists([first] * 4)
    context = backend.prefill(prompts_of(prompts), 1000)
    scores, _ = score_in_parts(Decoding(backend, context, index), every, 10_000)
    scores = scores.view(4, -1)
    for user in range(4):
        legal = np.asarray([_open(trie, masked[user], sid) for sid in range(trie.num_sids)])
        mine = np.where(legal, scores[user].numpy(), np.nan)
        best = -np.sort(-mine[np.isfinite(mine)])[:k]
        got = beams.score[user].numpy()
        got = got[got > -np.inf]
        if width == 100:
            assert np.allclose(got, best, atol=1e-4)
            lost = bool((mine == -np.inf).any())
            assert bool(beams.failed[user]) == (lost and not len(best))
            pruned = float(beams.pruned[user])
            if len(best) < k:
                assert pruned == (UNSCORED if lost else -np.inf)
        pruned = float(beams.pruned[user])
        if len(got) == k and got[-1] > pruned:  # certified, whatever was dropped or dead
            assert np.allclose(got, best, atol=1e-4)
        if pruned == -np.inf:
            assert np.isfinite(mine[legal]).sum() <= len(got) or len(got) == k


def _open(trie, masked, sid) -> bool:
    """Whether no prefix of a SID is masked."""
    node = int(trie.node_of_sid[sid])
    while node:
        if masked[node]:
            return False
        node = int(trie.parent[node])
    return True


# --- counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [*backends.WRONG, "few_prompts", "few_nodes"])
@pytest.mark.parametrize("task", ["score", "generate", "label"])
def test_an_answer_of_another_count_stops_the_run(nightshelf, tmp_path, task, wrong):
    write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 5, **TASKS[task]}, engine__backend=f"{HERE}:{wrong}")
    err = nightshelf("run", config, check=5).err
    assert "than it was asked for" in err
    assert not (tmp_path / PARTITION).exists()


@pytest.mark.parametrize("wrong", backends.WRONG_VECTORS)
def test_embeddings_of_another_count_or_width_stop_the_run(nightshelf, tmp_path, wrong):
    write_inputs(tmp_path)
    backend = f"{HERE}:vectors_{wrong}"
    config = write_config(tmp_path, task={"embed": {}}, engine__backend=backend)
    assert "embeddings than it was asked for" in nightshelf("run", config, check=5).err
    assert not (tmp_path / PARTITION).exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_settings", "takes one argument"),
        ("two_settings", "takes one argument"),
        ("not_callable", "takes one argument"),
        ("NoEmbed", "takes one argument"),  # its constructor takes no settings
        ("says_no_embed", "no method embed"),
        ("OldExtend", "extend does not take 2 arguments"),
        ("a-b", "is not supported"),
        ("", "is not supported"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "validate"])
def test_what_is_no_backend_is_told_before_anything_runs(
    nightshelf, tmp_path, command, name, words
):
    write_inputs(tmp_path)
    config = write_config(tmp_path, engine__backend=f"{HERE}:{name}")
    done = nightshelf(command, config, "--output", "json", check=2)
    assert words in done.err + done.out
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("name", ["no.such.module:create", f"{HERE}:nothing_here"])
def test_a_backend_that_is_not_there_is_told_when_planning(nightshelf, tmp_path, name):
    write_inputs(tmp_path)
    done = nightshelf("plan", write_config(tmp_path, engine__backend=name), check=5)
    assert "cannot be loaded" in done.err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("returns_nothing", "NoneType has no method"),
        ("returns_no_embed", "NoEmbed has no method embed"),
        ("returns_old_extend", "extend does not take 2 arguments"),
        ("returns_no_facts", "facts is not a BackendFacts"),
    ],
)
def test_what_a_factory_makes_is_looked_at_before_a_row_runs(nightshelf, tmp_path, name, words):
    write_inputs(tmp_path)
    config = write_config(tmp_path, engine__backend=f"{HERE}:{name}")
    assert words in nightshelf("run", config, check=5).err


def test_a_library_of_the_backend_may_fail_in_its_own_way(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_a_backend.py").write_text("def create(settings:\n")
    from engine.backends.registry import check_backend, spec_of

    with pytest.raises(EngineError, match="SyntaxError"):
        check_backend(EngineSettings(backend="half_a_backend:create"))
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        spec_of("torhc")


@pytest.mark.parametrize("when", ["imported", "called"])
def test_a_backend_that_ends_the_process_is_one_that_cannot_start(
    nightshelf, tmp_path, monkeypatch, when
):
    monkeypatch.syspath_prepend(tmp_path)
    body = "def create(settings):\n    sys.exit(0)\n"
    name = f"a_script_{when}"
    end = "sys.exit()\n" if when == "imported" else ""
    (tmp_path / f"{name}.py").write_text(f"import sys\n\n{body}{end}")
    write_inputs(tmp_path)
    config = write_config(tmp_path, engine__backend=f"{name}:create")
    done = nightshelf("run", config, check=5)
    assert f"backend '{name}:create'" in done.err
    assert "SystemExit" in done.err


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task", [{"score": {}, "generate": {"width": 8}}, {"label": {"labels": ["y", "n"]}}]
)
def test_how_a_shard_is_cut_does_not_depend_on_the_shards_before_it(nightshelf, tmp_path, task):
    write_inputs(tmp_path)
    config = write_config(tmp_path, task={"k": 5, **task}, engine__backend=f"{HERE}:small_device")
    backends.PACKS.clear()
    nightshelf("run", config)
    together = list(backends.PACKS)
    assert len(together) > 4, "no pack had to be cut"
    (receipt,) = tmp_path.glob("runs/*/receipts/*3.json")
    receipt.unlink()
    backends.PACKS.clear()
    nightshelf("run", config)
    assert backends.PACKS and together[-len(backends.PACKS) :] == backends.PACKS


@pytest.mark.parametrize(
    ("raised", "is_memory"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (torch.OutOfMemoryError("no room"), True),
        (MemoryError(), True),
        (RuntimeError("size mismatch for weight"), False),
        (KeyError("model_type"), False),
    ],
)
def test_only_a_lack_of_memory_is_called_one(tmp_path, monkeypatch, raised, is_memory):
    def create(settings: EngineSettings):
        raise raised

    monkeypatch.setattr(backends, "returns_nothing", create)
    config = RunConfig.model_construct(engine=EngineSettings(backend=f"{HERE}:returns_nothing"))
    with pytest.raises(EngineError) as caught, open_engine(config, None):
        pass
    assert ("smaller model" in str(caught.value)) == is_memory


def test_a_checked_backend_answers_as_the_one_it_checks():
    plain, held = FakeBackend(), checked(FakeBackend())
    prompts = prompts_of([[1, 2], [3]])
    assert torch.equal(plain.embed(prompts, "last"), held.embed(prompts, "last"))
    assert held.facts == plain.facts

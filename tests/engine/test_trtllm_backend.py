"""The TensorRT-LLM backend over its strict double: numbers against the oracle in every mode, and
what it does where the engine refuses, lies or is small."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.backend import Norm, Targets, TokenColumns
from engine.backends.trtllm.checkpoint import read_checkpoint
from engine.backends.trtllm.context import TrtllmContext
from engine.backends.trtllm.memory import plan_beams, plan_encode
from engine.backends.trtllm.packing import DELIMITER, CallBudget, plan_calls
from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.prompts.labels import LabelTokens
from engine.scoring.items import score_in_parts, score_items
from engine.scoring.labels import label_items
from engine.trees.device_trie import to_device
from engine.trees.sid_trie import build_trie
from engine.trees.token_tree import build_token_tree
from schemas.errors import EngineError, ShardFailedError
from schemas.requests import Ragged
from schemas.settings import EngineSettings, TrtllmSettings
from tests.cases.helpers import CPU, pack, write_projector
from tests.engine.oracle import Oracle
from tests.factories import (
    TINY_DECODER,
    bound_space,
    prompts_of,
    random_codes,
    random_prompts,
    save_tokenizer,
    tiny_model,
)

NORMS = ("full_vocab", "sid_range", "level", "trie")
PREFIX = [4, 9, 2]
MODES = {
    "hidden states": {},
    "logits": {"plugin": "off"},
    "single items": {"multi_item": "off"},
    "single items, logits": {"plugin": "off", "multi_item": "off"},
    "small calls": {"max_num_tokens": 64, "max_batch_size": 3},
    "small calls, logits": {"max_num_tokens": 64, "max_batch_size": 3, "plugin": "off"},
}


class Work:
    """A random ragged catalog, prompts and candidates, and what they score by definition."""

    def __init__(self, model, seed=1, norm="full_vocab"):
        rng = np.random.default_rng(seed)
        self.trie = build_trie(random_codes(rng, 30, ragged=bool(seed % 2)))
        self.index = to_device(self.trie, bound_space(), norm, CPU)
        self.prompts = random_prompts(rng, 5, longest=20)
        self.sets = [rng.choice(30, n, replace=False).tolist() for n in rng.integers(1, 30, 5)]
        self.oracle = Oracle(model, self.trie, bound_space(), norm)

    def score(self, backend, max_rows=1000):
        tree = build_token_tree(self.trie, Ragged.from_lists(self.sets))
        context = backend.prefill(prompts_of(self.prompts, PREFIX), tree.num_rows)
        return score_items(Decoding(backend, context, self.index), tree, max_rows)

    def beams(self, backend, width=4, k=6):
        context = backend.prefill(prompts_of(self.prompts, PREFIX), 0)
        prompts = torch.arange(len(self.prompts))
        widths = (width,) * self.trie.depth
        return beam_search(
            Decoding(backend, context, self.index), prompts=prompts, widths=widths, k=k
        )

    def want(self):
        pairs = [(u, int(self.trie.sid_of_item[i])) for u, s in enumerate(self.sets) for i in s]
        scores = [self.oracle.score(PREFIX + self.prompts[u], sid) for u, sid in pairs]
        return torch.tensor(scores, dtype=torch.float32)


def assert_right(backend, work):
    """Scores of candidates and of beams are what the model says, one item at a time."""
    torch.testing.assert_close(work.score(backend), work.want(), rtol=0, atol=1e-5)
    beams = work.beams(backend)
    for user, prompt in enumerate(work.prompts):
        found = beams.score[user] > -torch.inf
        sids = beams.sid[user][found].tolist()
        want = [work.oracle.score(PREFIX + prompt, sid) for sid in sids]
        assert sids
        torch.testing.assert_close(beams.score[user][found], torch.tensor(want), rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_and_norm_scores_as_the_model_does(start, model_folder, mode, norm):
    backend = start(**MODES[mode])
    assert backend.uses_multi_item == (MODES[mode].get("multi_item") != "off")
    assert_right(backend, Work(model_folder, 1, norm))


@pytest.mark.parametrize("mode", ["hidden states", "logits", "single items"])
def test_labels_are_read_behind_each_item(start, model_folder, mode):
    work = Work(model_folder)
    backend = start(**MODES[mode])
    context = backend.prefill(prompts_of(work.prompts, PREFIX), 0)
    got, _ = label_items(
        Decoding(backend, context, work.index),
        Ragged.from_lists(work.sets),
        LabelTokens(
            Ragged.from_lists([[0, 1, 2]] * len(work.sets)), TokenColumns(np.asarray([2, 7, 9])), []
        ),
        suffix=np.asarray([5, 6]),
        softmax=False,
        max_rows=1000,
    )
    pairs = [(u, int(work.trie.sid_of_item[i])) for u, s in enumerate(work.sets) for i in s]
    want = [
        work.oracle.labels(PREFIX + work.prompts[u], sid, [5, 6], [2, 7, 9], softmax=False)
        for u, sid in pairs
    ]
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_agree_with_the_torch_backend(start, model_folder, dtype):
    from engine.backends.torch.backend import TorchBackend

    work = Work(model_folder, 2)
    want = work.score(TorchBackend(model_folder, dtype, CPU))
    atol = 1e-5 if dtype == "float32" else 0.3
    torch.testing.assert_close(work.score(start(dtype=dtype)), want, rtol=0, atol=atol)


def test_packed_items_get_scores_of_their_own(start, model_folder):
    """A1, sglang #22544: all packed items once got the same score."""
    work = Work(model_folder, 2)
    work.sets = [list(range(30))] * 5
    scores = work.score(start()).view(5, 30)
    distinct = work.trie.num_sids
    assert all(len(row.unique()) == distinct for row in scores)


def test_a_tree_is_forwarded_in_one_go_with_hidden_states(start, double, model_folder):
    work = Work(model_folder, 2)
    backend = start()
    double.CALLS.clear()
    work.score(backend)
    calls = [kwargs for name, kwargs in double.CALLS if name == "encode"]
    assert len(calls) == 1 + ([1 for s in work.sets if not s] != [])
    assert sum(len(c["inputs"]) for c in calls) == len(work.prompts)


def test_what_was_sent_is_counted(start, double, model_folder):
    work = Work(model_folder, 2)
    backend = start()
    double.CALLS.clear()
    context = backend.prefill(prompts_of(work.prompts, PREFIX), 0)
    scores, _ = score_in_parts(
        Decoding(backend, context, work.index), Ragged.from_lists(work.sets), 40
    )
    sent = sum(
        len(prompt["prompt_token_ids"])
        for name, kwargs in double.CALLS
        if name == "encode"
        for prompt in kwargs["inputs"]
    )
    assert context.forwarded.sum() == sent
    assert not backend.facts.shares_prefix
    torch.testing.assert_close(scores, work.want(), rtol=0, atol=1e-5)


def test_dead_beams_are_not_sent(start, double, model_folder):
    """A beam wider than the catalog at its first levels has rows that lead nowhere."""
    trie = build_trie(np.asarray([[0, 0, 1], [0, 1, 2], [1, 0, 3]], dtype=np.int32))
    index = to_device(trie, bound_space(), "full_vocab", CPU)
    dead = torch.tensor([1])  # user 0 must not enter the first code
    backend = start()
    double.CALLS.clear()
    context = backend.prefill(prompts_of([[3, 1]]), 0)
    beams = beam_search(
        Decoding(backend, context, index), prompts=torch.arange(1), widths=(4, 4, 4), k=4, dead=dead
    )
    assert (beams.score > -torch.inf).sum() == 1
    lens = [
        p["multi_item_part_lens"]
        for name, kwargs in double.CALLS
        if name == "encode"
        for p in kwargs["inputs"]
        if "multi_item_part_lens" in p
    ]
    assert lens == [[2, 1], [2, 2]]


# -- soft tokens ---------------------------------------------------------------------------------


def test_two_users_with_the_same_tokens_never_share_anything(start, model_folder):
    """A4, A5: same tokens, other vectors; in one call, after one another, and without a vector."""
    work = Work(model_folder, 2)
    vectors = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    backend = start()
    tree = build_token_tree(work.trie, Ragged.from_lists([range(30)] * 2))

    def scores(soft):
        packed = pack([[3, 0, 5]] * 2, prefix=PREFIX, soft=soft)
        context = backend.prefill(packed, tree.num_rows)
        return score_items(Decoding(backend, context, work.index), tree, 1000).view(2, -1)

    both = scores({(0, 1): vectors[0], (1, 1): vectors[1]})
    swapped = scores({(0, 1): vectors[1], (1, 1): vectors[0]})
    none = scores(None)
    for user, vector in enumerate(vectors):
        want = [
            work.oracle.score([*PREFIX, 3, 0, 5], int(s), {4: vector})
            for s in work.trie.sid_of_item
        ]
        torch.testing.assert_close(both[user], torch.tensor(want), rtol=0, atol=1e-5)
    torch.testing.assert_close(both.flip(0), swapped, rtol=0, atol=1e-5)
    assert (both - none).abs().amax(dim=1).min() > 1e-3


def test_beams_and_candidates_agree_for_users_with_vectors(start, model_folder):
    """A27: a user vector with beams and with scoring; both work and say the same."""
    work = Work(model_folder, 2)
    vector = torch.randn(32, generator=torch.Generator().manual_seed(1))
    backend = start()
    packed = pack([[3, 0, 5]], soft={(0, 1): vector})
    tree = build_token_tree(work.trie, Ragged.from_lists([range(30)]))
    scored = score_items(Decoding(backend, backend.prefill(packed, 0), work.index), tree, 1000)
    context = backend.prefill(packed, 0)
    widths = (50,) * work.trie.depth
    beams = beam_search(
        Decoding(backend, context, work.index),
        prompts=torch.arange(1),
        widths=widths,
        k=work.trie.num_sids,
    )
    by_sid = dict(zip(work.trie.sid_of_item.tolist(), scored.tolist(), strict=True))
    want = torch.tensor([by_sid[sid] for sid in beams.sid[0].tolist()])
    torch.testing.assert_close(beams.score[0], want, rtol=0, atol=1e-5)


def llama(folder: Path) -> str:
    """A decoder that our plug-in does not extend."""
    torch.manual_seed(0)
    config = LlamaConfig(**TINY_DECODER, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def test_another_decoder_is_scored_by_its_logits_and_refuses_vectors(start, tmp_path):
    model = llama(tmp_path)
    backend = start(model=model)
    assert not backend.takes_vectors
    assert_right(backend, Work(model, 1, "level"))
    with pytest.raises(EngineError, match="user vectors need our plug-in"):
        backend.prefill(pack([[3, 0, 5]], soft={(0, 1): torch.zeros(32)}), 0)
    with pytest.raises(EngineError, match="embeddings need our plug-in"):
        backend.embed(prompts_of([[3, 0, 5]]), "last")


def test_a_projector_without_the_plug_in_is_refused_at_start(start, tmp_path):
    (tmp_path / "model").mkdir()
    projector = write_projector(tmp_path / "projector")
    with pytest.raises(EngineError, match="LlamaForCausalLM"):
        start(model=llama(tmp_path / "model"), projector=projector)
    with pytest.raises(EngineError, match="plugin is off"):
        start(projector=projector, plugin="off")


def test_the_users_checkpoint_is_never_written(start, model_folder):
    before = {p.name: p.stat().st_mtime_ns for p in Path(model_folder).iterdir()}
    backend = start()
    prepared = Path(backend._prepared.path)
    config = json.loads((prepared / "config.json").read_text())
    assert config["architectures"] == ["NightshelfQwen3ForCausalLM"]
    assert config["nightshelf_placeholder_id"] == 63
    backend.close()
    assert not prepared.exists()
    assert before == {p.name: p.stat().st_mtime_ns for p in Path(model_folder).iterdir()}


def test_the_placeholder_of_native_beams_must_be_a_token_that_no_text_has(start, tmp_path):
    (tmp_path / "model").mkdir()
    model = tiny_model(tmp_path / "model", vocab=35)  # every row is a token of the tokenizer
    projector = write_projector(tmp_path / "projector")
    backend = start(model=model, projector=projector)
    assert backend.takes_vectors  # encode is given positions
    with pytest.raises(EngineError, match=r"placeholder_id"):
        backend.start_beams(width=2, steps=3, prompt_tokens=9)
    start(model=model, projector=projector, placeholder_id=7).start_beams(
        width=2, steps=3, prompt_tokens=9
    )
    with pytest.raises(EngineError, match="below 35"):
        start(model=model, placeholder_id=35)


# -- what the engine may get wrong ---------------------------------------------------------------


@pytest.mark.parametrize("plugin", ["auto", "off"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("multi_item_refused", "does not support multi-item"),
        ("multi_item_wrong", "item 1 differs"),
        ("delimiter_shift", "end of the prompt differs"),
    ],
)
def test_a_build_without_true_multi_item_scoring_is_worked_around(
    start, double, model_folder, caplog, fault, words, plugin
):
    double.FAULTS.add(fault)
    with caplog.at_level(logging.WARNING):
        backend = start(plugin=plugin)
    assert not backend.uses_multi_item
    assert words in caplog.text
    assert_right(backend, Work(model_folder))


def test_an_engine_that_dies_fails_the_shard_and_not_the_row(start, double, model_folder):
    backend = start()
    double.FAULTS.add("dies")
    with pytest.raises(ShardFailedError, match="illegal memory access") as caught:
        Work(model_folder).score(backend)
    assert "new worker" in str(caught.value)


def test_running_out_of_memory_reaches_the_engine_that_packs_smaller(start, monkeypatch):
    backend = start()

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(backend._engine._llm, "encode", full)
    context = backend.prefill(prompts_of([[1, 2]]), 0)
    zero = torch.tensor([0])
    targets = Targets(row=zero, column=zero, columns=TokenColumns(np.asarray([3])))
    with pytest.raises(torch.OutOfMemoryError):
        backend.log_probs(context, zero, targets, Norm("full_vocab"))


def test_a_model_that_is_no_checkpoint_is_refused(start, tmp_path):
    with pytest.raises(EngineError, match="not a checkpoint"):
        start(model=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(EngineError, match="no safetensors weights"):
        start(model=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(EngineError, match="not a checkpoint"):
        start(model=str(tmp_path))


# -- packing and memory --------------------------------------------------------------------------


def context_of(prompts, nodes):
    """A context with nodes given as (prompt, parent node or -1, token, depth)."""
    context = TrtllmContext(prompts_of(prompts, PREFIX), CPU)
    table = np.asarray(nodes, dtype=np.int64).reshape(-1, 4)
    context.prompt, context.parent, context.token, context.depth = table.T
    return context


def test_chains_that_hold_others_are_sent_once():
    nodes = [(0, -1, 11, 1), (0, 0, 12, 2), (0, 0, 13, 2), (1, -1, 14, 1)]
    context = context_of([[5, 6], [7]], nodes)
    rows = np.asarray([0, 1, 2, 3, 4, 5])
    calls = plan_calls(context, rows, CallBudget(1000, 1000, 8), multi_item=True)
    assert len(calls) == 1
    first, second = calls[0].requests
    assert first.part_lens == [5, 2, 2]
    d = DELIMITER
    assert first.tokens.tolist() == [*PREFIX, 5, 6, d, 11, 12, d, 11, 13, d]
    assert second.tokens.tolist() == [*PREFIX, 7, d, 14, d]
    read = dict(zip(first.rows.tolist(), first.positions.tolist(), strict=True))
    assert read == {2: 6, 3: 7, 4: 10, 0: 4}  # last item tokens, and the prompt's own last token
    assert sorted(calls[0].rows.tolist()) == rows.tolist()


@pytest.mark.parametrize("multi_item", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_calls_read_every_row_once_and_keep_to_the_limits(seed, multi_item):
    rng = np.random.default_rng(seed)
    prompts = random_prompts(rng, 6, longest=9)
    nodes: list[tuple[int, int, int, int]] = []
    for i in range(60):
        user = int(rng.integers(6))
        parents = [-1, *(j for j in range(i) if nodes[j][0] == user and nodes[j][3] < 4)]
        parent = int(rng.choice(parents))
        depth = 1 if parent < 0 else nodes[parent][3] + 1
        nodes.append((user, parent, int(rng.integers(64)), depth))
    context = context_of(prompts, nodes)
    rows = np.sort(rng.choice(66, 40, replace=False))
    budget = CallBudget(50, 30, 3)
    calls = plan_calls(context, rows, budget, multi_item=multi_item)
    assert sorted(np.concatenate([c.rows for c in calls]).tolist()) == rows.tolist()
    for call in calls:
        assert len(call.requests) <= budget.max_prompts
        assert sum(len(r.tokens) for r in call.requests) <= budget.max_tokens
        assert len({r.part_lens is None for r in call.requests}) == 1
        for request in call.requests:
            assert len(request.tokens) <= budget.max_sequence
            for row, position in zip(request.rows, request.positions, strict=True):
                here = prompts[request.prompt][-1] if row < 6 else nodes[row - 6][2]
                assert request.tokens[position] == here


def facts_of(folder, **changes):
    import dataclasses

    settings = EngineSettings(backend="trtllm", model=folder, dtype="bfloat16")
    return dataclasses.replace(read_checkpoint(settings), **changes)


def test_limits_are_planned_from_the_memory(model_folder):
    big = facts_of(model_folder, vocab_size=151936, weight_bytes=4 << 30, max_positions=40960)
    settings = EngineSettings(backend="trtllm", model=model_folder, dtype="bfloat16")
    logits = plan_encode(big, settings, 80 << 30, head=True)
    hidden = plan_encode(big, settings, 80 << 30, head=False)
    assert 1024 <= logits.max_num_tokens < 80 << 30
    assert logits.max_num_tokens * 151936 * 6 < 80 << 30
    assert logits.max_num_tokens <= hidden.max_num_tokens <= 32768
    assert plan_encode(big, settings, None, head=True).max_num_tokens == 8192
    asked = settings.model_copy(update={"trtllm": TrtllmSettings(max_num_tokens=777)})
    assert plan_encode(big, asked, 80 << 30, head=True).max_num_tokens == 777
    short = facts_of(model_folder, max_positions=256)
    assert plan_encode(short, settings, None, head=False).max_seq_len == 256


def test_the_beam_store_is_never_as_large_as_the_defaults(model_folder):
    """Six arrays of 2048 x width x 40960 numbers are hundreds of GiB."""
    facts = facts_of(model_folder, weight_bytes=4 << 30, max_positions=40960)
    plan = plan_beams(facts, 128, 3, 500, 80 << 30)
    assert plan.max_seq_len == 503
    assert plan.max_batch_size * plan.width * plan.max_seq_len * 24 < 40 << 30
    assert plan.kv_tokens >= plan.max_batch_size * (500 + 128 * 3)
    with pytest.raises(EngineError, match="do not fit") as caught:
        plan_beams(facts, 4096, 3, 4000, (8 << 30) + (1 << 28))
    assert "constrained" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        (None, None, None),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "FP8"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ("hf_quant_config.json", {"producer": {"name": "modelopt"}}, "unknown"),
        ("config.json", {"quantization_config": {"quant_algo": "FP8"}}, "FP8"),
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ],
)
def test_a_quantised_checkpoint_is_known_by_its_files(tmp_path, file, content, found):
    """ModelOpt writes hf_quant_config.json; others a section of config.json."""
    model = tmp_path / "model"
    tiny_model(model)
    if file is not None:
        path = model / file
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | content))
    facts = read_checkpoint(EngineSettings(backend="trtllm", model=str(model), dtype="bfloat16"))
    assert facts.quantised == found


@pytest.mark.parametrize("fault", ["outputs_reversed", "output_missing", "output_doubled"])
@pytest.mark.parametrize("plugin", ["auto", "off"])
def test_outputs_of_other_prompts_are_refused(start, double, model_folder, fault, plugin):
    backend = start(plugin=plugin, multi_item="off")
    work = Work(model_folder)
    assert torch.allclose(work.score(backend), work.want(), atol=1e-5)
    double.FAULTS.add(fault)
    with pytest.raises(EngineError, match="not those of the prompts it was given"):
        work.score(backend)


@pytest.mark.parametrize("fault", ["outputs_reversed", "output_missing", "output_doubled"])
def test_beams_of_other_prompts_are_refused(start, double, fault):
    backend = start()
    backend.start_beams(width=4, steps=3, prompt_tokens=40)
    context = backend.prefill(prompts_of([[5, 7, 9], [2, 3]]), 0)
    double.FAULTS.add(fault)
    with pytest.raises(EngineError, match="not those of the prompts it was given"):
        backend.native_beams(context)

"""Every call that the adapter makes is one that the contract of TensorRT-LLM allows; and taking a
rule of the contract away from the adapter makes a test fail.

tests/engine/trtllm_double/contract.json is the contract, with where it was read.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.backends.trtllm import beam_engine, encode_engine, packing, self_test
from engine.backends.trtllm import checks as checkup
from engine.backends.trtllm.library import load_library
from schemas.errors import EngineError, ShardFailedError
from tests.cases.helpers import pack
from tests.engine.test_trtllm_backend import Work, assert_right
from tests.factories import prompts_of

ADAPTER = Path(encode_engine.__file__).parent


@pytest.fixture
def calls(start, double, model_folder):
    """What the adapter calls for scoring, beams, embeddings and native beams, vectors included."""
    backend = start(max_num_tokens=64)
    assert_right(backend, Work(model_folder))
    vector = torch.ones(32)
    packed = pack([[3, 0, 5]] * 2, soft={(0, 1): vector, (1, 1): -vector})
    backend.embed(packed, "mean")
    backend.start_beams(width=4, steps=3, prompt_tokens=20)
    backend.native_beams(backend.prefill(packed, 0))
    backend.native_beams(backend.prefill(prompts_of([[1, 2, 3]]), 0))
    return list(double.CALLS)


def of(calls, name):
    found = [kwargs for called, kwargs in calls if called == name]
    assert found, f"the adapter never called {name}"
    return found


def contract():
    from tensorrt_llm import contract as module

    return module


@pytest.mark.parametrize("name", ["LLM", "SamplingParams", "KvCacheConfig"])
def test_constructors_are_given_only_what_the_contract_names(calls, name):
    known = contract().constructor(name)
    for kwargs in of(calls, name):
        assert set(kwargs) <= set(known)


@pytest.mark.parametrize("method", ["encode", "generate"])
def test_methods_are_given_only_what_the_contract_names(calls, method):
    known = {*contract().parameters("LLM", method), "model_kwargs"}
    for kwargs in of(calls, method):
        assert set(kwargs) <= known


def test_what_must_never_be_passed_is_not(calls):
    for kwargs in of(calls, "LLM"):
        assert not {"quant_config", "sampler_type", "backend"} & set(kwargs)
        assert kwargs.get("trust_remote_code", False) is False
        assert kwargs["enable_chunked_prefill"] is False


def test_sizes_are_always_set(calls):
    for kwargs in of(calls, "LLM"):
        assert {"max_batch_size", "max_seq_len", "max_num_tokens"} <= set(kwargs)
        assert all(isinstance(kwargs[n], int) for n in ("max_batch_size", "max_seq_len"))


def test_encode_engines_are_built_as_multi_item_scoring_asks(calls):
    protocol = next(e for e in contract().load()["entries"] if e.get("kind") == "protocol")
    for kwargs in of(calls, "LLM"):
        if kwargs.get("encode_only"):
            assert {n: kwargs[n] for n in protocol["engine"]} == protocol["engine"]
            assert "max_beam_width" not in kwargs
    for kwargs in of(calls, "encode"):
        assert kwargs["batch_indexed_model_output"] is False
        assert kwargs["copy_logits_to_host"] is False
        reserved = next(m for m in contract().entry("LLM")["methods"] if m["name"] == "encode")
        assert not set(kwargs["model_kwargs"]) & set(reserved["model_kwargs_reserved"])


def test_prompts_have_known_keys_and_layouts(calls):
    keys = next(e for e in contract().load()["entries"] if e.get("kind") == "typed_dict")["keys"]
    seen_items = False
    for kwargs in of(calls, "encode"):
        for prompt in kwargs["inputs"]:
            assert set(prompt) <= set(keys)
            parts = prompt.get("multi_item_part_lens")
            if parts is not None:
                seen_items = True
                assert len(parts) >= 2
                assert sum(parts) + len(parts) == len(prompt["prompt_token_ids"])
    assert seen_items
    for kwargs in of(calls, "generate"):
        assert all("multi_item_part_lens" not in prompt for prompt in kwargs["inputs"])


def test_beams_ask_for_the_width_of_their_engine_and_for_scores(calls):
    width = next(k["max_beam_width"] for k in of(calls, "LLM") if "max_beam_width" in k)
    for kwargs in of(calls, "SamplingParams"):
        assert kwargs["use_beam_search"] is True
        assert kwargs["best_of"] == width >= kwargs["n"]
        assert kwargs["logprobs"] == 0
        assert kwargs["ignore_eos"] is True
        assert kwargs["end_id"] is not None  # there is no tokenizer to take one from


def test_block_reuse_is_off_and_vectors_have_a_salt(calls):
    assert all(kwargs["enable_block_reuse"] is False for kwargs in of(calls, "KvCacheConfig"))
    salts = [k["cache_salt"] for k in of(calls, "generate") if k["cache_salt"] is not None]
    assert salts
    assert all(len(set(some)) == len(some) for some in salts)
    for kwargs in of(calls, "generate"):
        vectors = ["multi_modal_embeddings" in prompt for prompt in kwargs["inputs"]]
        assert (kwargs["cache_salt"] is not None) == all(vectors) == any(vectors)


def imported():
    """`module.name` of what the adapter takes from TensorRT-LLM, read from its source."""
    for path in sorted(ADAPTER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensorrt_llm"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_what_is_imported_is_in_the_contract(double):
    known = {
        f"{entry['module']}.{entry['name']}"
        for entry in contract().load()["entries"]
        if "module" in entry and "name" in entry
    }
    names = set(imported())
    assert len(names) >= 7
    assert names <= known


# -- rules taken away ----------------------------------------------------------------------------


def test_without_the_width_rule_the_beam_engine_does_not_start(start, monkeypatch):
    make = beam_engine.BeamEngine.__init__

    def narrower(self, library, *args):
        def params(**kwargs):
            return library.sampling_params(**kwargs | {"best_of": 2, "n": 2})

        make(self, dataclasses.replace(library, sampling_params=params), *args)

    monkeypatch.setattr(beam_engine.BeamEngine, "__init__", narrower)
    with pytest.raises(EngineError, match="do not have the scores"):
        start().start_beams(width=4, steps=3, prompt_tokens=20)


def test_without_part_lengths_nothing_is_scored(start, monkeypatch, model_folder):
    backend = start()

    def plain_layout(tokens, part_lens):
        prompt = {"prompt_token_ids": tokens.tolist()}
        return prompt if part_lens is None else prompt | {"multi_item_part_lens": part_lens[:-1]}

    monkeypatch.setattr(encode_engine, "as_prompt", plain_layout)
    with pytest.raises(ShardFailedError, match="multi_item_part_lens"):
        assert_right(backend, Work(model_folder))


def test_a_layout_without_delimiters_is_caught_before_it_is_sent():
    with pytest.raises(AssertionError, match="delimiter"):
        encode_engine.as_prompt(np.arange(5), [3, 2])


def test_read_at_the_delimiter_the_scores_are_wrong(start, monkeypatch, model_folder):
    """The rule `last item token` deleted: the row behind it is read."""
    backend = start()
    reads = packing._Chains._reads

    def one_further(self, prompt, mine, begin):
        return reads(self, prompt, mine, begin + 1)

    monkeypatch.setattr(packing._Chains, "_reads", one_further)
    with pytest.raises(AssertionError, match="not close"):
        assert_right(backend, Work(model_folder))


def test_the_prompt_end_read_elsewhere_is_wrong(start, monkeypatch, model_folder):
    backend = start()
    build = packing._Chains.multi_item

    def at_the_delimiter(self, prompt, mine):
        request = build(self, prompt, mine)
        ends = request.rows < self._context.num_prompts
        return dataclasses.replace(request, positions=request.positions + ends)

    monkeypatch.setattr(packing._Chains, "multi_item", at_the_delimiter)
    with pytest.raises(AssertionError, match="not close"):
        assert_right(backend, Work(model_folder))


def reusing(library):
    """The library, whose KV cache reuses blocks whatever the adapter says."""

    def config(**kwargs):
        return library.kv_cache_config(**kwargs | {"enable_block_reuse": True})

    return dataclasses.replace(library, kv_cache_config=config)


def two_users(monkeypatch, *, reuse, salted):
    """The leak test of the checkup, over an adapter with or without its two defences."""
    monkeypatch.setattr(checkup, "PROBE_TOKENS", 8)
    monkeypatch.setattr(checkup, "PROBE_ITEMS", 4)
    if reuse:
        monkeypatch.setattr(checkup, "load_library", lambda: reusing(load_library()))
    if not salted:
        monkeypatch.setattr(beam_engine, "salt_of", lambda vectors: "one for all")


@pytest.mark.parametrize(
    ("reuse", "salted", "safe"),
    [(False, True, True), (False, False, True), (True, True, True), (True, False, False)],
)
def test_only_with_reuse_and_without_a_salt_do_two_users_share_keys(
    double, monkeypatch, model_folder, reuse, salted, safe
):
    two_users(monkeypatch, reuse=reuse, salted=salted)
    checks = {c.name: c for c in checkup.checkup(model_folder, dtype="float32")}
    assert checks["native beams"].ok
    assert checks["two users, one prompt"].ok  # encode has no cache
    assert checks["two users, native beams"].ok is safe, checks["two users, native beams"].detail


@pytest.mark.parametrize("keyword", ["quant_config", "max_beams", "sampler_typ"])
def test_an_unknown_keyword_ends_the_start(start, monkeypatch, keyword):
    make = encode_engine.EncodeEngine.__init__

    def with_more(self, library, *args, **kwargs):
        def llm(**arguments):
            return library.llm(**arguments, **{keyword: None})

        make(self, dataclasses.replace(library, llm=llm), *args, **kwargs)

    monkeypatch.setattr(encode_engine.EncodeEngine, "__init__", with_more)
    with pytest.raises(EngineError, match=f"invalid argument: {keyword}"):
        start()


def test_without_the_self_test_a_wrong_build_would_be_believed(
    start, double, monkeypatch, model_folder
):
    double.FAULTS.add("multi_item_wrong")
    monkeypatch.setattr(self_test, "_compare", lambda *args: None)
    with pytest.raises(AssertionError, match="not close"):
        assert_right(start(), Work(model_folder))

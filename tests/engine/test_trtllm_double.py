"""The double itself: it refuses what upstream refuses, and its numbers are the model's."""

from __future__ import annotations

import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM


@pytest.fixture
def llm(double, model_folder):
    """Build an engine with sizes set."""
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi import KvCacheConfig

    def make(reuse=False, **kwargs):
        sizes = {"max_batch_size": 4, "max_seq_len": 64, "max_num_tokens": 64}
        return LLM(
            model=model_folder,
            skip_tokenizer_init=True,
            dtype="float32",
            cuda_graph_config=None,
            kv_cache_config=KvCacheConfig(enable_block_reuse=reuse),
            **sizes | kwargs,
        )

    return make


@pytest.fixture
def encoder(llm):
    return llm(encode_only=True, attn_backend="FLASHINFER")


def items(*parts):
    """A multi-item prompt of these parts, delimiter 1."""
    tokens = [t for part in parts for t in [*part, 1]]
    return {"prompt_token_ids": tokens, "multi_item_part_lens": [len(part) for part in parts]}


def test_items_read_as_prompts_of_their_own_and_delimiters_mean_nothing(encoder, model_folder):
    prefix, first, second = [5, 9, 2], [7, 8], [30, 31, 32]
    out = encoder.encode([items(prefix, first, second)], batch_indexed_model_output=False)[0].logits
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        for end, tokens in ((2, prefix), (5, prefix + first), (9, prefix + second)):
            want = model(input_ids=torch.tensor([tokens])).logits[0, -1]
            torch.testing.assert_close(out[end], want, rtol=0, atol=1e-5)
    assert out.shape == (len(prefix) + len(first) + len(second) + 3, 64)


def test_plain_prompts_of_a_call_do_not_see_each_other(encoder):
    alone = encoder.encode([{"prompt_token_ids": [3, 4]}], batch_indexed_model_output=False)
    both = encoder.encode(
        [{"prompt_token_ids": [9, 9, 9]}, {"prompt_token_ids": [3, 4]}],
        batch_indexed_model_output=False,
    )
    torch.testing.assert_close(alone[0].logits, both[1].logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([{"prompt_token_ids": [1, 2], "multi_item_part_lens": [1]}], "at least two"),
        ([{"prompt_token_ids": [1, 2, 3], "multi_item_part_lens": [1, 1]}], "inconsistent"),
        ([items([1], [2]), {"prompt_token_ids": [1]}], "for all prompts or for none"),
        ([{"prompt_token_ids": [1]}] * 5, "exceeds max_batch_size"),
        ([{"prompt_token_ids": [1] * 40}] * 2, "exceeds max_num_tokens"),
        ([{"prompt_token_ids": [64]}], "vocabulary"),
    ],
)
def test_encode_refuses(encoder, prompts, words):
    with pytest.raises(ValueError, match=words):
        encoder.encode(prompts, batch_indexed_model_output=False)


@pytest.mark.parametrize("backend", ["VANILLA", "TRTLLM"])
def test_other_attention_refuses_items(llm, backend):
    engine = llm(encode_only=True, attn_backend=backend)
    with pytest.raises(ValueError, match="does not support multi-item scoring"):
        engine.encode([items([1], [2])], batch_indexed_model_output=False)


def beams(**kwargs):
    from tensorrt_llm import SamplingParams

    fixed = {"max_tokens": 3, "use_beam_search": True, "best_of": 4, "n": 4, "end_id": -1}
    return SamplingParams(**fixed | {"logprobs": 0} | kwargs)


def test_engines_do_one_thing(llm, encoder):
    with pytest.raises(RuntimeError, match="encode_only"):
        encoder.generate([[1, 2]], beams())
    with pytest.raises(RuntimeError, match="encode_only"):
        llm().encode([[1, 2]])
    with pytest.raises(RuntimeError, match="pickled"):
        pickle.dumps(encoder)
    encoder.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        encoder.encode([[1]])


def test_every_request_has_the_width_of_the_engine(llm):
    from tensorrt_llm.llmapi import RequestError

    engine = llm(max_beam_width=4)
    assert len(engine.generate([[1, 2]], beams())[0].outputs) == 4
    for other in ({"best_of": 2, "n": 2}, {"use_beam_search": False, "best_of": 1, "n": 1}):
        with pytest.raises(RequestError, match="is not equal to max_beam_width"):
            engine.generate([[1, 2]], beams(**other))


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("LLM", {"quant_config": None}), ("KvCacheConfig", {"block_reuse": True})],
)
def test_unknown_keywords_raise_as_upstream(double, model_folder, name, kwargs):
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm.llmapi import KvCacheConfig

    with pytest.raises(ValueError, match=next(iter(kwargs))):
        LLM(model=model_folder, **kwargs) if name == "LLM" else KvCacheConfig(**kwargs)
    with pytest.raises(TypeError, match="beam_size"):
        SamplingParams(beam_size=4)
    with pytest.raises(ValueError, match="multiple returns"):
        SamplingParams(best_of=4)


def test_default_sizes_with_beams_are_out_of_memory(llm):
    with pytest.raises(torch.OutOfMemoryError, match="beam store"):
        llm(max_beam_width=8192, max_batch_size=2048, max_seq_len=256)


def test_beam_scores_are_sums_of_log_probabilities(llm, model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    for output in llm(max_beam_width=4).generate([[1, 2], [7]], beams()):
        for beam in output.outputs:
            tokens = torch.tensor([output.prompt_token_ids + beam.token_ids])
            with torch.inference_mode():
                rows = model(input_ids=tokens).logits[0].log_softmax(-1)
            at = len(output.prompt_token_ids) - 1
            want = sum(float(rows[at + i, t]) for i, t in enumerate(beam.token_ids))
            assert beam.cumulative_logprob == pytest.approx(want, abs=1e-5)
    silent = llm(max_beam_width=4).generate([[1, 2]], beams(logprobs=None))[0]
    assert all(beam.cumulative_logprob is None for beam in silent.outputs)


def test_more_beams_than_candidates_leave_empty_rows(llm):
    outputs = llm(max_beam_width=100).generate([[1]], beams(max_tokens=1, best_of=100, n=100))
    found = [beam.token_ids for beam in outputs[0].outputs]
    assert sum(not ids for ids in found) == 36  # 64 tokens are all there is


def test_a_processor_sees_what_was_sampled_in_its_slot_and_not_its_beams_history(llm):
    from tensorrt_llm import LogitsProcessor

    seen: list[list[list[int]]] = []

    class Watch(LogitsProcessor):
        def __call__(self, req_id, logits, token_ids, stream_ptr, client_id):
            seen.append([list(ids) for ids in token_ids])

    engine = llm(max_beam_width=8)
    params = beams(max_tokens=4, best_of=8, n=8, logits_processor=Watch())
    found = {tuple(b.token_ids[:2]) for b in engine.generate([[1, 2]], params)[0].outputs}
    told = {tuple(ids[2:4]) for ids in seen[-1]}
    assert not found <= told  # a mask by history would be another beam's from the third token on

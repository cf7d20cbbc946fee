"""What holds of a mixture of experts, each of which sees the rows that were sent to it: its scores
are the definition's to 1e-5 nats whatever shares the batch, and no promise is made of their bits.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine.backends.torch.backend import TorchBackend
from engine.decoding import Decoding
from engine.scoring.items import score_in_parts
from engine.trees.device_trie import to_device
from engine.trees.sid_trie import build_trie
from schemas.requests import Ragged
from tests.factories import (
    TINY_DECODER,
    bound_space,
    prompts_of,
    random_codes,
    random_prompts,
    save_tokenizer,
)

CPU = torch.device("cpu")
EXPERTS = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **TINY_DECODER, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
            head_dim=8,
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**TINY_DECODER, num_local_experts=4, num_experts_per_tok=2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", EXPERTS)
def test_scores_are_the_definitions_to_1e_5_whatever_shares_the_batch(tmp_path, kind):
    torch.manual_seed(3)
    model = EXPERTS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    backend = TorchBackend(str(tmp_path), "float32", CPU)
    rng = np.random.default_rng(0)
    trie = build_trie(random_codes(rng, 30))
    index = to_device(trie, bound_space(), "full_vocab", CPU)
    prompts = random_prompts(rng, 12, longest=20)
    items = list(range(0, 30, 4))

    def scores(some: list[list[int]]) -> torch.Tensor:
        context = backend.prefill(prompts_of(some), 1000)
        lists = Ragged.from_lists([items] * len(some))
        return score_in_parts(Decoding(backend, context, index), lists, 1000)[0].view(len(some), -1)

    together, backwards = scores(prompts), scores(prompts[::-1]).flip(0)
    alone = torch.cat([scores([prompt]) for prompt in prompts])
    for other in (backwards, alone):
        assert float((other - together).abs().max()) <= 1e-5
    want = torch.tensor(
        [[plain(model, trie, prompt, item) for item in items] for prompt in prompts]
    )
    assert float((together - want).abs().max()) <= 1e-4


@torch.inference_mode()
def plain(model, trie, prompt, item) -> float:
    """A score by the library's own forward over the prompt and the item."""
    codes = trie.codes_of_sid[trie.sid_of_item[item]]
    tokens = [int(bound_space().token_ids[level][code]) for level, code in enumerate(codes)]
    logits = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    log_probs = torch.log_softmax(logits.float(), dim=-1)[len(prompt) - 1 :]
    return float(log_probs[torch.arange(len(tokens)), torch.tensor(tokens)].sum())

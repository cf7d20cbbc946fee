"""How large TensorRT-LLM's engines are made. Its own defaults are for serving, and ruinous here:
the sampler of a beam engine alone holds six arrays of `max_batch_size x max_beam_width x
max_seq_len` numbers, and defaults to a batch of 2048 at the model's full length.

A function of the device's whole memory and of the settings, so that a resumed run packs the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.backends.trtllm.checkpoint import CheckpointFacts
from schemas.errors import EngineError
from schemas.settings import EngineSettings

BLOCK = 32  # tokens of a block of the KV cache
_DEFAULT_TOKENS = 8192  # of one encode call where the memory is not known
_LEAST_TOKENS, _MOST_TOKENS = 1024, 32768
_ENCODE_SHARE = 0.5  # of the memory besides the weights; the rest: workspaces, caches, the trie
_BEAM_SHARE = 0.6  # of what is left beside both engines' weights
_BEAM_ARRAYS = 6  # numbers of 4 bytes per (request, beam, position) in the sampler
_MOST_BEAM_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """Limits of one encode call."""

    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class BeamPlan:
    """Limits of the beam engine. `kv_tokens` is what its KV cache holds."""

    width: int
    steps: int
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    kv_tokens: int


def plan_encode(
    facts: CheckpointFacts, settings: EngineSettings, total_bytes: int | None, *, head: bool
) -> EncodePlan:
    """Limits of the encode engine.

    Args:
        total_bytes: of the device; None: not known.
        head: logits of every token are held, `[tokens, vocab]` in the model's precision and in
            float32; with our plug-in they are not.
    """
    wanted = settings.trtllm.max_num_tokens
    tokens = _DEFAULT_TOKENS if wanted == "auto" else wanted
    if wanted == "auto" and total_bytes is not None:
        each = facts.sizes.pass_bytes_per_row
        if head:
            each += facts.vocab_size * (facts.sizes.item_bytes + 4)
        room = _ENCODE_SHARE * (total_bytes - facts.weight_bytes)
        tokens = max(_LEAST_TOKENS, min(int(room // each), _MOST_TOKENS))
    # A packed prompt is as long as its items together; its positions are not, but the engine
    # compares the one with the other.
    longest = min(tokens, facts.max_positions)
    return EncodePlan(tokens, min(settings.trtllm.max_batch_size, tokens), longest)


def plan_beams(
    facts: CheckpointFacts, width: int, steps: int, prompt_tokens: int, total_bytes: int | None
) -> BeamPlan:
    """Limits of an engine that searches `width` beams of `steps` tokens behind prompts.

    Raises:
        EngineError: not even one prompt fits on the device.
    """
    length = prompt_tokens + steps
    blocks = -(-prompt_tokens // BLOCK) + width * (1 + -(-steps // BLOCK))
    kv_tokens = blocks * BLOCK
    each = kv_tokens * facts.sizes.kv_bytes_per_row + _BEAM_ARRAYS * 4 * width * length
    batch = 8
    if total_bytes is not None:
        room = _BEAM_SHARE * (total_bytes - 2 * facts.weight_bytes)
        batch = min(int(room // each), _MOST_BEAM_REQUESTS)
        if batch < 1:
            raise EngineError(
                "native beams do not fit on the device",
                expected=f"{each / 2**30:.1f} GiB for one prompt",
                got=f"{max(room, 0) / 2**30:.1f} GiB besides two copies of the weights",
                do="Use task.generate.mode: constrained, a smaller width, or shorter prompts.",
            )
    tokens = max(length, min(batch * prompt_tokens, _MOST_TOKENS))
    return BeamPlan(width, steps, batch, length, tokens, batch * kv_tokens)

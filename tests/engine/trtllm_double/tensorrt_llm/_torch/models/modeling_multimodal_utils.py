"""Vectors into embeddings."""

from __future__ import annotations

import torch


def find_input_mm_embeds(mm_embeds, multimodal_params):
    """All of them: nothing is cached and nothing is chunked in this double."""
    if len(mm_embeds) > 1 and len(mm_embeds) != len(multimodal_params):
        raise ValueError("Number of mm_embeds does not match number of multimodal params")
    return mm_embeds


def filter_mm_token_from_input_ids(input_ids, vocab_size, mm_token_ids=None):
    """Indices of text tokens and of placeholders."""
    if mm_token_ids is None:
        mask = input_ids >= vocab_size
    else:
        mask = torch.isin(input_ids, mm_token_ids.to(input_ids.device, input_ids.dtype))
    return torch.where(~mask)[0], torch.where(mask)[0]


def fuse_input_embeds(
    embedding_layer,
    input_ids,
    mm_embeds,
    mm_token_ids=None,
    text_token_indices=None,
    mm_token_indices=None,
    **kwargs,
):
    """`(None, embeddings)`, or `(input_ids, None)` without vectors."""
    if not mm_embeds:
        return input_ids, None
    vectors = torch.cat(mm_embeds, dim=0)
    if text_token_indices is None or mm_token_indices is None:
        text_token_indices, mm_token_indices = filter_mm_token_from_input_ids(
            input_ids, embedding_layer.num_embeddings, mm_token_ids
        )
    if len(mm_token_indices) != len(vectors):
        raise ValueError(
            f"Multimodal token count mismatch: found {len(mm_token_indices)} image tokens in "
            f"input_ids but received {len(vectors)} image embeddings."
        )
    out = embedding_layer(input_ids.clamp(max=embedding_layer.num_embeddings - 1))
    out = out.index_copy(0, mm_token_indices, vectors.to(out))
    return None, out

"""Names of the tensors that pass through `LLM.encode(**model_kwargs)` to our model's forward."""

from __future__ import annotations

HIDDEN_ONLY = "nightshelf_hidden_only"  # give hidden states instead of logits
SOFT_POSITIONS = "nightshelf_soft_positions"  # [S] among all tokens of the call
SOFT_VECTORS = "nightshelf_soft_vectors"  # [S, hidden]

MODALITY = "nightshelf_user"  # of the vectors in `multi_modal_embeddings`, for generate
TOKEN_IDS = "nightshelf_token_ids"  # the prompt of such a request, placeholders in place

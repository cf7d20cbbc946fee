"""The embedded default: a Hugging Face causal LM in PyTorch, with our attention and head."""

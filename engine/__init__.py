"""Compute on one device: prompts, token trees, scoring and beam search, over a small Backend protocol."""

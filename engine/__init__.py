"""Compute on one device: prompts, token trees, scoring and beams over a Backend protocol."""

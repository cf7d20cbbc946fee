"""Semantic IDs as trees: the catalog's trie, token trees of candidates, what no beam may enter."""

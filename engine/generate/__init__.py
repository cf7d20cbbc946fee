"""Semantic-ID beam search over the catalog's trie, with a certificate that a list is exact."""

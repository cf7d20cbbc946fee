"""Exact search over a token tree: the best k leaves, without scoring the rest.

`best_first.py` is the loop; `open_prefixes.py` holds what each user may still expand, `pool.py` the
results so far, `masks.py` what a user may not get, `children.py` reads log-probabilities. Both
generation (the catalog's trie) and ranking (a user's candidates) run on it.
"""

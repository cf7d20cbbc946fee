"""The best semantic IDs of the whole catalog: exact search, or beams with a certificate.

Begin with `search.py`; `beam_search.py` has `plain.py` beside it, the same in obvious lines.
"""

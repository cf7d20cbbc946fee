"""Candidates: ranked by search (`ranking.py`), all scored (`items.py`), or labelled (`labels.py`)."""

"""Candidates: ranked by search (`ranking.py`), all scored (`items.py`), labelled (`labels.py`)."""

"""Around runs: how far they are, what one user got, days in a row, and what may be removed.

`doctor.py` looks at the machine that they would run on. Nothing here scores a shard.
"""

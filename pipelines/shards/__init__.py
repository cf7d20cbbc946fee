"""One shard through the engine: scored, ranked, written, and a receipt last.

`run_shard` is what every launcher calls; a shard with a receipt is done and is never run again.
"""

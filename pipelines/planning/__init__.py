"""What a run will do, decided before it starts: its inputs, its identity, its shards, its estimate.

A plan refuses what the run would refuse; nothing is scored to find out.
"""

"""Users, candidates and exclusions, from tables to the rows of one shard.

`prepare` joins the tables into self-contained shard files; `read_batches` reads one shard and sorts
its rows into users that the engine takes and rows for the quarantine.
"""

"""One run from plan to table, whatever launches its shards.

`run.py` has the steps and `scheduler.py` hands out the shards; `launcher.py` and the scheduler's
`Pool` say what a launcher does. `shard_worker.py` is what runs at the far end. `ending.py` is
SIGTERM, `run_lock.py` keeps other runs of the partition out, and the rest is the run's folder.
"""

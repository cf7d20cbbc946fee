"""The Spark launcher, and the only home of pyspark: one task per shard, one engine per executor.

`launch.py` is the driver's side and `worker.py` the executors'; between them are the files of
`attempts.py`. `conf.py`, `ask.py` and `probe.py` look before anything is loaded, `tables.py` and
`content.py` copy tables of Spark's catalog, `prepare.py` writes shards in executors, `register.py`
tells a table of Spark what was published.
"""

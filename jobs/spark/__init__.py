"""The Spark launcher: one task per shard, one engine per executor. The only home of pyspark."""

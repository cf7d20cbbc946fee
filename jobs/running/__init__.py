"""One run from plan to table, whatever launches its shards: its lock, its retries, its end."""

"""What a shard becomes before it runs: prompts and trees packed under a budget of rows."""

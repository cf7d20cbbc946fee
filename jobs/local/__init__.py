"""Launchers of this machine: shards in this process, or in one process per device."""

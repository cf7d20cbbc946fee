"""Launcher of this machine: a pool of processes, one per device, or this process alone.

`launcher.py` chooses; `inline.py` and `processes.py` are the pools.
"""

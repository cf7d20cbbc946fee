"""The engine beside its peers on the same work, timed in one process."""

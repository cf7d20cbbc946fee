"""The engine beside its peers on the same work, and beside what the machine can do."""

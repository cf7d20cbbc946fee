"""Files of a run, on any file system: whole writes, checked reads, hashes, seals.

What goes wrong in the libraries below is said as one of our errors. Knows nothing of what a file
holds.
"""

"""The command line: one module per group of commands, and what they share.

`app` puts the commands together. Results go to stdout, progress to stderr.
"""

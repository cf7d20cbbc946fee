"""`python -m jobs` is `nightshelf`."""

from jobs.cli import main

main()

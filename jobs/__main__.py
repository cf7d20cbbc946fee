"""`python -m jobs` is `nightshelf`."""

from jobs.cli.app import main

if __name__ == "__main__":  # processes that engines start import this module
    main()

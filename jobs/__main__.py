"""`python -m jobs` is `python -m nightshelf`."""

from nightshelf.__main__ import main

if __name__ == "__main__":  # processes that engines start import this module
    main()

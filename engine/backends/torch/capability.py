"""What a machine may have or not, tried at start-up against plain arithmetic before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger("nightshelf.torch")

T = TypeVar("T")


def tried(what: str, make: Callable[[], T], right: Callable[[T], bool]) -> T | None:
    """What `make` makes where it works and is `right`; else None, and the log says why.

    Args:
        what: its name, for the log.
        make: may raise whatever a missing compiler, kernel or processor feature raises.
        right: whether it computes what plain code computes; may raise too.
    """
    try:
        made = make()
        if right(made):
            return made
        log.warning("%s: not used, it does not give what plain code gives", what)
    except Exception as err:  # unknown builds and machines fail in unknown ways; plain code works
        log.warning("%s: not used, %s: %s", what, type(err).__name__, err)
    return None

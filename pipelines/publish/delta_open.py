"""Opening a Delta table, and its library's errors in our words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, DeltaProtocolError, TableNotFoundError

from pipelines.storage import files
from schemas.errors import ConfigError, NightshelfError, StorageError, is_panic, quoted

_LACKING = re.compile(r"(?i)unsupported|schema error|protocol|feature|column mapping")


def load(path: str) -> DeltaTable | None:
    """The table; None where there is none.

    Raises:
        ConfigError: it cannot be read by this version of the library.
    """
    try:
        return DeltaTable(path)
    except TableNotFoundError:
        return None
    except DeltaError as err:
        if isinstance(err, DeltaProtocolError) or _LACKING.search(str(err)):
            raise ConfigError(
                "the Delta table has features that this version of deltalake cannot read",
                got=quoted(files.first_line(err)),
                where=path,
                do="Publish to a table without them, or upgrade deltalake.",
                field="output.path",
            ) from err
        raise


@contextmanager
def as_ours(path: str) -> Iterator[None]:
    """Turn the library's errors into ours."""
    try:
        yield
    except (NightshelfError, GeneratorExit):
        raise
    except BaseException as err:  # delta-rs raises many kinds; a user gets one, with its words
        if not isinstance(err, Exception) and not is_panic(err):
            raise
        raise StorageError(
            f"the Delta table could not be used: {type(err).__name__}",
            got=quoted(files.first_line(err)),
            where=path,
            do="Its rows are as they were.",
        ) from err

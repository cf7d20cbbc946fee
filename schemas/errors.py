"""The error tree. Every error a user can cause is here, with the exit code it ends the command
with.

NightshelfError                 1   something we did not foresee, still said in words
├── ConfigError                 2   usage or configuration
│   └── AccessError             2   no credentials, no permission, or no place to write to
├── InputError                  3   an input breaks its contract
│   ├── TableError              3   a column is missing or mistyped, a file cannot be read
│   └── CatalogError            3   a semantic ID or the token behind it is wrong
├── RunError                    4   the run is incomplete; running it again is safe
│   ├── ShardFailedError        4   one shard failed in its worker
│   ├── AccountingError         4   rows in and rows out do not balance
│   ├── ChangedError            4   an input or the model is not the one that was planned with
│   └── StorageError            4   a file could not be written or read back
│       ├── MissingFileError    4   it is not there
│       ├── DamagedFileError    4   its content is not what was written
│       ├── RecordError         2   a record of another release, which this one cannot read
│       └── ConflictError       4   somebody else changed the same partition meanwhile
├── EngineError                 5   the engine cannot start
└── AuditRefusedError           6   a gate refused; what was published before stays
    ├── WithdrawnError          6   the run was taken back; only a person publishes it again
    └── ComparisonRefusedError  6   two runs differ by more than was allowed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, ClassVar

_MAX_VALUE_CHARS = 200


def quoted(value: object) -> str:
    """`repr` of a value, cut to a length that fits a message."""
    text = value if isinstance(value, str) and value.startswith("'") else repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 1] + "…"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` when a known word is close, else an empty string."""
    folded = {one.casefold(): one for one in known}  # a word in capitals is as close as can be
    close = get_close_matches(word.casefold(), list(folded), n=1, cutoff=0.6)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust (polars, deltalake, tokenizers) panicked.

    Each has a class of that name of its own, below `BaseException`: `except Exception` lets it go.
    """
    return type(error).__name__ == "PanicException"


class NightshelfError(Exception):
    """Base of the tree. Reads as: *what failed: expected X, got Y (where). Do this.*"""

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False  # whether the same work may succeed when it is tried again

    def __init__(
        self,
        what: str,
        *,
        expected: str | None = None,
        got: str | None = None,
        where: str | None = None,
        do: str | None = None,
        field: str | None = None,
    ) -> None:
        self.what, self.expected, self.got, self.where, self.do = what, expected, got, where, do
        self.field = field  # the setting or the column it is about, where one can be named
        super().__init__(what)

    def __str__(self) -> str:
        facts = [f"expected {self.expected}"] if self.expected else []
        facts += [f"got {self.got}"] if self.got else []
        text = self.what + (": " + ", ".join(facts) if facts else "")
        text += f" ({self.where})" if self.where else ""
        return text + (f". {self.do}" if self.do else "")

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process borders; the default loses keyword-only arguments.
        facts = (self.what, self.expected, self.got, self.where, self.do, self.field)
        own = {"retryable": self.retryable} if "retryable" in self.__dict__ else None
        return (_rebuild, (type(self), *facts), own)

    def as_record(self) -> dict[str, Any]:
        """The error as JSON from which `of_record` makes it again."""
        names = ("what", "expected", "got", "where", "do", "field", "retryable")
        return {"class": type(self).__name__} | {name: getattr(self, name) for name in names}

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> NightshelfError:
        """The error of a record, of its own class where that is one of this tree."""
        known = {kind.__name__: kind for kind in _tree(NightshelfError)}
        facts = {name: record[name] for name in ("expected", "got", "where", "do", "field")}
        found = known.get(record["class"], NightshelfError)(record["what"], **facts)
        if found.retryable != record["retryable"]:
            found.__dict__["retryable"] = record["retryable"]
        return found

    def as_json(self) -> dict[str, str | int | None]:
        """The error as the command line prints it with `--output json`."""
        return {"kind": self.kind, "exit_code": self.exit_code, "message": str(self)}


def _tree(kind: type[NightshelfError]) -> Iterator[type[NightshelfError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _tree(one)


def _rebuild(
    cls: type[NightshelfError],
    what: str,
    expected: str | None,
    got: str | None,
    where: str | None,
    do: str | None,
    field: str | None,
) -> NightshelfError:
    return cls(what, expected=expected, got=got, where=where, do=do, field=field)


class ConfigError(NightshelfError):
    """A setting or a command-line argument cannot be used."""

    exit_code, kind = 2, "config"


class AccessError(ConfigError):
    """A file or a store may not be used: no credentials, no permission, or a path that no file can
    have. The same command would fail again.
    """


class InputError(NightshelfError):
    """An input breaks its contract."""

    exit_code, kind = 3, "input"


class TableError(InputError):
    """A table's files or columns are not what the contract says."""

    kind = "table"


class CatalogError(InputError):
    """A semantic ID, or a token behind it, cannot be used."""

    kind = "catalog"


class RunError(NightshelfError):
    """The run is incomplete; running the same command again continues it."""

    exit_code, kind, retryable = 4, "run", True


class ShardFailedError(RunError):
    """One shard failed in its worker."""

    kind = "shard"


class AccountingError(RunError):
    """Rows in and rows out do not balance: nothing of the shard is kept."""

    kind = "accounting"


class ChangedError(RunError):
    """An input or the model is not the one that the run was planned with."""

    kind = "changed"


class StorageError(RunError):
    """A file of the run or of the table could not be written or read back."""

    kind = "storage"


class MissingFileError(StorageError, FileNotFoundError):
    """A file is not there; whoever looks for one may catch it as `FileNotFoundError`."""

    kind = "missing"


class DamagedFileError(StorageError):
    """The content of a file is not what was written, or cannot be decoded."""

    kind = "damaged"


class RecordError(StorageError):
    """A file that another release left has a format that this one does not know: trying it again
    helps nobody.
    """

    exit_code, kind, retryable = 2, "record", False


class ConflictError(StorageError):
    """Another publisher changed the same partition meanwhile. What it published stands, nothing of
    this run is visible, and running again is safe.
    """

    kind = "conflict"


class EngineError(NightshelfError):
    """The engine cannot start on this machine with this model."""

    exit_code, kind = 5, "engine"


class AuditRefusedError(NightshelfError):
    """An audit gate refused to publish the run."""

    exit_code, kind = 6, "audit"


class WithdrawnError(AuditRefusedError):
    """A run was taken back by a person, and only a person publishes it again."""

    kind = "withdrawn"


class ComparisonRefusedError(AuditRefusedError):
    """Two runs differ by more than the limits of `nightshelf compare` allow."""

    kind = "comparison"

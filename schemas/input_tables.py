"""The forms of an input: a path, a Delta or Iceberg table, a table of Spark's catalog."""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, WithJsonSchema

from schemas.places import place
from schemas.section import one_line

TABLE = "table:"  # how an input says that it is a table of Spark's catalog, and no path
FolderType = Literal["text", "int64", "double", "bool", "date"]
Fill = Callable[[str, Callable[[str], str]], str]


@dataclass(frozen=True, slots=True)
class DeltaInput:
    """A Delta table, by its folder; the latest version where none is named."""

    delta: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class IcebergInput:
    """An Iceberg table: its folder, one of its metadata files, or its name in a catalog. The
    current snapshot where none is named.

    `catalog` holds pyiceberg's properties of the catalog, and may name it; without it, the name
    begins with that of a catalog which pyiceberg is configured for.
    """

    iceberg: str
    snapshot: int | None = None
    catalog: dict[str, str | int | float | bool] = field(default_factory=dict)

    @property
    def is_name(self) -> bool:
        """Whether the table is named in a catalog, and not by a path."""
        return bool(self.catalog) or "/" not in self.iceberg


@dataclass(frozen=True, slots=True)
class FolderInput:
    """Parquet files, and the types of columns that stand in the names of their folders."""

    path: str
    hive: dict[str, FolderType] = field(default_factory=dict)


Source = str | DeltaInput | IcebergInput | FolderInput


def place_of(source: Source | None) -> str | None:
    """Where an input is, in a text."""
    if isinstance(source, DeltaInput):
        return source.delta
    if isinstance(source, IcebergInput):
        return source.iceberg
    return source.path if isinstance(source, FolderInput) else source


def placed(source: Source | None, fill: Fill) -> Source | None:
    """With `fill(path, quote)` for its path; what is put into a path is a name and never a pattern,
    so it goes through `quote`.
    """
    if isinstance(source, DeltaInput):
        return replace(source, delta=fill(source.delta, str))
    if isinstance(source, IcebergInput):
        if source.is_name:
            return source
        return replace(source, iceberg=fill(source.iceberg, str))
    if isinstance(source, FolderInput):
        return replace(source, path=fill(source.path, glob.escape))
    return source if source is None else fill(source, glob.escape)


def _read(value: Any) -> Any:
    """An input as it stands in the file; `{table: db.users}` is the text `table:db.users`."""
    if isinstance(value, str):
        return one_line(value if value.startswith(TABLE) else place(value))
    if not isinstance(value, dict):
        return value
    form = next((form for form in _FORMS if form in value), None)
    if form is None:
        raise ValueError(
            "must be a path, {path: …}, {delta: …}, {iceberg: …}, or {table: NAME} for a table of "
            "Spark's catalog"
        )
    what, *others = _FORMS[form]
    where = value[form]
    if not isinstance(where, str) or not where.strip():
        raise ValueError(f"{form} must be {what}")
    one_line(where)
    if unknown := [str(key) for key in value if key not in (form, *others)]:
        allowed = ", ".join((form, *others))
        raise ValueError(f"{{{form}: …}} has no key {unknown[0]!r} (allowed: {allowed})")
    return _MAKERS[form](where, value)


def _table(where: str, _: dict[str, Any]) -> str:
    return TABLE + where.strip()


def _delta(where: str, value: dict[str, Any]) -> DeltaInput:
    return DeltaInput(delta=place(where), version=_number(value, "version"))


def _iceberg(where: str, value: dict[str, Any]) -> IcebergInput:
    properties = value.get("catalog") or {}
    plain = isinstance(properties, dict) and all(
        isinstance(key, str) and isinstance(one, str | int | float)
        for key, one in properties.items()
    )
    if not plain:
        raise ValueError("catalog must be the properties of a catalog, such as {type: rest}")
    return IcebergInput(
        iceberg=where if properties or "/" not in where else place(where),
        snapshot=_number(value, "snapshot"),
        catalog=properties,
    )


def _folder(where: str, value: dict[str, Any]) -> FolderInput:
    types, known = value.get("hive") or {}, get_args(FolderType)
    if not isinstance(types, dict) or any(kind not in known for kind in types.values()):
        raise ValueError(f"hive must give columns their types, each one of {', '.join(known)}")
    return FolderInput(path=place(where), hive={str(name): types[name] for name in types})


def _number(value: dict[str, Any], name: str) -> int | None:
    number = value.get(name)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 63:
        raise ValueError(f"{name} must be a whole number, 0 or more")
    return number


_FORMS: dict[str, tuple[str, ...]] = {
    "table": ("the name of a table",),
    "delta": ("the folder of a Delta table", "version"),
    "iceberg": ("a folder, a metadata file or the name of an Iceberg table", "snapshot", "catalog"),
    "path": ("a path", "hive"),
}
_MAKERS: dict[str, Callable[[str, dict[str, Any]], Source]] = {
    "table": _table,
    "delta": _delta,
    "iceberg": _iceberg,
    "path": _folder,
}


def _schema_of(form: str, **others: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {form: {"type": "string"}, **others},
        "required": [form],
        "additionalProperties": False,
    }


_WHOLE: dict[str, Any] = {"type": "integer", "minimum": 0}
_TYPES: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {"enum": list(get_args(FolderType))},
}
_INPUT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        _schema_of("table"),
        _schema_of("delta", version=_WHOLE),
        _schema_of("iceberg", snapshot=_WHOLE, catalog={"type": "object"}),
        _schema_of("path", hive=_TYPES),
    ]
}
Input = Annotated[Source, BeforeValidator(_read), WithJsonSchema(_INPUT_SCHEMA)]

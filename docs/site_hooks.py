"""Hooks of the documentation's site: the page of all settings, and links to the repository.

mkdocs calls `on_files` and `on_page_markdown`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from schemas.settings import json_schema  # noqa: E402  # its folder is known only now

SETTINGS_PAGE = "settings.md"
_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page that is made from the settings themselves."""
    files.append(File.generated(config, SETTINGS_PAGE, content=settings_page(json_schema())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ name the file: the site holds the pages alone."""

    def named(match: re.Match[str]) -> str:
        target = (ROOT / "docs" / match[2]).resolve()
        return f"`{target.relative_to(ROOT)}`" if target.exists() else match[0]

    return _LINK.sub(named, markdown)


def settings_page(schema: dict[str, Any]) -> str:
    """Every setting of a JSON Schema: its type, default and description, a table per section."""
    sections: dict[str, list[str]] = {}
    for name, field in walk(schema, schema):
        section = name.rpartition(".")[0] or "the top of the file"
        default = "required" if field.get("required") else _code(field.get("default"))
        cells = (f"`{name}`", words(field, schema), default, field.get("description", ""))
        row = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        sections.setdefault(section, []).append(row)
    lines = [
        "# Every setting",
        "",
        "Made from the settings' own schema, which `nightshelf schema` prints for editors. "
        "[Configuration](configuration.md) explains them.",
    ]
    for section, rows in sections.items():
        head = ["", f"## {section}", "", "| setting | type | default | |", "|---|---|---|---|"]
        lines += [*head, *rows]
    return "\n".join(lines) + "\n"


def walk(
    node: dict[str, Any], schema: dict[str, Any], before: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """All settings by their dotted names, sections before what is in them."""
    required = node.get("required", [])
    inner = []
    for name, field in node.get("properties", {}).items():
        section = _section(field, schema)
        if section is None or "default" in field and field["default"] is None:
            yield f"{before}{name}", {**field, "required": name in required}
        if section is not None:
            inner.append((name, section))
    for name, section in inner:
        yield from walk(section, schema, f"{before}{name}.")


def _section(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """The section that a setting is, or None for a plain value."""
    for one in (field, *field.get("anyOf", ())):
        if "$ref" in one:
            found: dict[str, Any] = schema["$defs"][one["$ref"].rpartition("/")[2]]
            return found
    return None


def words(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """A setting's type in words."""
    if "anyOf" in field:
        kinds = [words(one, schema) for one in field["anyOf"]]
        return " or ".join(kind for kind in dict.fromkeys(kinds) if kind != "null")
    if "$ref" in field:
        return "section"
    if "enum" in field:
        return ", ".join(_code(value) for value in field["enum"])
    if "const" in field:
        return _code(field["const"])
    kind = str(field.get("type", "any"))
    if kind == "array":
        inner = field.get("items", {})
        return f"list of {words(inner, schema)}" if inner else "list"
    return kind + _range(field)


def _range(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "maximum": "≤", "exclusiveMinimum": ">", "exclusiveMaximum": "<"}
    parts = [f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field]
    return f", {' and '.join(parts)}" if parts else ""


def _code(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "empty" if value in ("", [], {}) else f"`{value}`"

"""A report as one HTML page: everything it needs is inside, and everything from tables is escaped.

The template escapes by itself (jinja2), the script writes texts as texts, JSON blocks escape `<`,
and a content security policy forbids every request and every script but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files as package_files
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from pipelines.catalog.build import is_saved
from pipelines.catalog.items import catalog_dir
from pipelines.report.charts import Chart
from pipelines.report.examples import Examples, shortened
from pipelines.report.figures import Figures
from pipelines.report.sentences import Told, tell
from pipelines.storage import files
from schemas.runs import RunManifest

_CUT = 200  # characters of a text of a table


def render(
    manifest: RunManifest, figures: Figures, charts: tuple[Chart, ...], examples: Examples
) -> str:
    """The page."""
    script = _template("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    task = manifest.plan.config.task
    told: Told = tell(manifest, figures, len(examples.users))
    drawn = [{**_fields(chart), "svg": Markup(chart.svg)} for chart in charts]
    empty = sum(user["status"] == "nothing_eligible" for user in examples.users)
    return _page().render(
        manifest=manifest,
        plan=manifest.plan,
        embed=not task.gives_lists,
        charts=drawn,
        exposure=figures.exposure,
        rules=figures.rules,
        people=len(examples.users),
        without_list=empty,
        every_night=examples.every_night,
        examples={
            "items": examples.items,
            "users": examples.users,
            "both": len(task.asked) > 1,
        },
        hashes=_hashes(manifest),
        config=_config(manifest),
        css=Markup(_template("report.css")),
        script=Markup(script),
        script_hash=Markup(f"sha256-{digest}"),
        **_fields(told),
    )  # fmt: skip


def _fields(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__}


def _template(name: str) -> str:
    return (package_files("pipelines.report") / "templates" / name).read_text(encoding="utf-8")


@cache
def _page() -> Template:
    """The template; a process that ends many runs compiles it once."""
    return _environment().from_string(_template("report.html"))


def _environment() -> Environment:
    made = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {
        "number": _number,
        "percent": _percent,
        "value": lambda value: f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}",
        "raw": json.dumps,
        "cut": lambda text, most=_CUT: shortened(str(text), most),
    }
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return made


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _config(manifest: RunManifest) -> str:
    kept = manifest.plan.config.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)


def _hashes(manifest: RunManifest) -> list[tuple[str, str]]:
    """What two runs have in common where these are equal."""
    plan = manifest.plan
    found: Mapping[str, str] = plan.hashes
    if "catalog" in plan.inputs and is_saved(catalog_dir(plan)):
        found = {**found, "catalog": files.hash_folder(catalog_dir(plan))}
    return [(name, value) for name, value in found.items() if value]

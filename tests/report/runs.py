"""Runs of every kind and every end, whose pages the tests look at. Each is made once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from jobs.cli.app import app
from tests.factories import write_config, write_inputs

HOSTILE_TITLES = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    '"><svg onload="window.hacked = 3">',
    "{{ 7 * 7 }} {% raw %} &lt;b&gt;",
    "\u202eright to left\u202d and back",
    "<!-- <script>",
    "long " * 400,
]
HOSTILE_USERS = [
    "<script>window.hacked = 4</script>",
    "u\" onmouseover='window.hacked = 5'",
    "\u202eevil",
    "x" * 3000,
    "u&amp;1",
]
HOSTILE_SURFACE = "<img src=x onerror=hack()>"


@dataclass(frozen=True)
class Made:
    """A run that has ended, and its page."""

    kind: str
    folder: Path
    manifest: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        return Path(self.manifest["plan"]["run_dir"])

    @property
    def page(self) -> Path:
        return self.run_dir / "report.html"

    @property
    def numbers(self) -> dict[str, Any]:
        """What the manifest says: its counts, and the summary's own numbers."""
        from schemas.runs import RunManifest

        manifest = RunManifest.model_validate(self.manifest)
        return {**manifest.counts.model_dump(), **manifest.summary()}


def run(*args: str | Path, check: int = 0) -> str:
    done = CliRunner().invoke(app, [str(a) for a in args])
    assert done.exit_code == check, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def replace(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    place = table.column_names.index(name)
    return table.set_column(place, name, pa.array(values, table.schema.field(name).type))


def write(folder: Path, name: str, table: pa.Table) -> None:
    pq.write_table(table, folder / f"{name}.parquet")


def hostile_inputs(folder: Path) -> None:
    """Texts that want out of the page, a user that is quarantined, candidates of nobody."""
    tables = write_inputs(folder)
    titles = tables["catalog"]["title"].to_pylist()
    titles[: len(HOSTILE_TITLES)] = HOSTILE_TITLES
    write(folder, "catalog", replace(tables["catalog"], "title", titles))
    users = tables["users"]["user_id"].to_pylist()
    renamed = dict(zip(users, HOSTILE_USERS, strict=False))
    for name in ("users", "candidates", "exclusions"):
        ids = [renamed.get(u, u) for u in tables[name]["user_id"].to_pylist()]
        tables[name] = replace(tables[name], "user_id", ids)
    segments = tables["users"]["segment"].to_pylist()
    segments[:2] = ["<b>bold</b>", "\u202esegment"]
    users = replace(tables["users"], "segment", segments)
    vectors = users["embedding"].to_pylist()
    vectors[-1] = [1.0, float("nan"), 3.0, 4.0]
    vectors[3] = [1.0]
    write(folder, "users", replace(users, "embedding", vectors))
    items = tables["candidates"]["item_ids"].to_pylist()
    items[5] = [*items[5], "<u>no item</u>", "i999"]
    write(folder, "candidates", replace(tables["candidates"], "item_ids", items))
    write(folder, "exclusions", tables["exclusions"])


def everything(folder: Path) -> None:
    """Both tasks, hostile texts, a run before it, a gate that warns, a price."""
    hostile_inputs(folder)
    config = write_config(
        folder,
        surface=HOSTILE_SURFACE,
        prompt__template="Hi {text:segment}{user_vector} saw {history}",
        audit={"max_score_drift": 0.0, "warn": ["score_drift"]},
        run__price_per_hour=2.5,
    )
    run("run", config, "--ds", "2026-11-27", "--set", "engine.seed=3")
    run("run", config)


def refused(folder: Path) -> None:
    write_inputs(folder)
    run("run", write_config(folder, audit={"min_exact_share": 1.0},
        task={"k": 5, "generate": {"search": "beam", "width": 2}}), check=6)  # fmt: skip


def _moody(folder: Path, moods: list[str]) -> Path:
    tables = write_inputs(folder)
    write(folder, "users", tables["users"].append_column("mood", pa.array(moods)))
    backend = "tests.cases.backends:raising_backend"
    return write_config(folder, engine__backend=backend, prompt__template="{mood}{history}")


def failed(folder: Path) -> None:
    run("run", _moody(folder, ["ok"] * 17 + ["no!"] + ["ok"] * 22), check=4)


def nothing(folder: Path) -> None:
    """Every shard failed."""
    run("run", _moody(folder, ["no!"] * 40), check=4)


def empty(folder: Path) -> None:
    """Published, and nobody got anything."""
    tables = write_inputs(folder)
    strangers = [["zz"]] * len(tables["candidates"])
    write(folder, "candidates", replace(tables["candidates"], "item_ids", strangers))
    run("run", write_config(folder, task={"k": 5, "score": {}}, audit={"allow_empty": True}))


def label(folder: Path) -> None:
    write_inputs(folder)
    run("run", write_config(folder, task={"k": 5, "label": {"labels": ["y", "n"]}}))


def embed(folder: Path) -> None:
    write_inputs(folder)
    run("run", write_config(folder, task={"embed": {}}))


def wide(folder: Path) -> None:
    write_inputs(folder, int_ids=True)
    run(
        "run", write_config(folder, output__layout="wide", task={"k": 60, "generate": {"width": 4}})
    )


def text(folder: Path) -> None:
    tables = write_inputs(folder)
    write(folder, "catalog", tables["catalog"].select(["item_id", "title"]))
    run("run", write_config(folder, sid=None, text={"column": "title"},
        task={"k": 5, "score": {}}, prompt__template="Hi {history}"))  # fmt: skip


KINDS = {
    made.__name__: made
    for made in (everything, refused, failed, nothing, empty, label, embed, wide, text)
}


def make(kind: str, folder: Path) -> Made:
    """The last run of its kind."""
    KINDS[kind](folder)
    manifests = [json.loads(p.read_text()) for p in folder.glob("runs/*/manifest.json")]
    return Made(kind, folder, max(manifests, key=lambda m: (m["plan"]["ds"], m["finished_at"])))

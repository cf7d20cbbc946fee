"""The documentation's site builds, works without a network, and what it shows can be run."""

from __future__ import annotations

import importlib.util
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import typer
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config as load_site

from jobs.cli.app import app
from schemas.config_file import load_config
from schemas.settings import RunConfig, json_schema

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("examples/*/*.md")])
LOADS = {  # what makes a browser fetch something, by tag
    "script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href",
}  # fmt: skip


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Code blocks of a language: what follows its name, and the code."""
    fence = rf"^```{language}\b([^\n]*)\n(.*?)^```"
    return re.findall(fence, page.read_text(), flags=re.S | re.M)


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    config = load_site(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    config.plugins.run_event("startup", command="build", dirty=False)
    build(config)  # strict: a warning ends it
    return folder


class Loads(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag in LOADS and attributes.get("rel") != "canonical":
            self.found.append(attributes.get(LOADS[tag]) or "")


def test_the_site_holds_every_page_and_fetches_nothing_from_elsewhere(site):
    pages = {page.relative_to(site).as_posix() for page in site.rglob("index.html")}
    for page in DOCS.glob("*.md"):
        name = "" if page.stem == "index" else f"{page.stem}/"
        assert f"{name}index.html" in pages
    assert "settings/index.html" in pages
    fetched = 0
    for page in site.rglob("*.html"):
        parser = Loads()
        parser.feed(page.read_text())
        fetched += len(parser.found)
        assert not [url for url in parser.found if "//" in url], page
    assert fetched > len(pages)
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\(\s*[\"']?(?:https?:)?//|@import", style.read_text()), style


def test_no_page_of_the_site_links_out_of_it(site):
    """Links to files of the repository become names: a reader of the site has no repository."""
    page = (site / "performance/index.html").read_text()
    assert "engine/backends/torch/fused_layers.py" in page
    assert "../engine" not in page


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r": ([a-z-]+\.md)", text))
    assert named == {page.name for page in DOCS.glob("*.md")} | {"settings.md"}


# --- settings -------------------------------------------------------------------------------------


def test_the_settings_page_has_every_setting_with_its_default(hooks):
    page = hooks.settings_page(json_schema())
    rows = re.findall(r"^\| `([a-z_.0-9]+)` \| (.+?) \| (\S.*?) \| ", page, flags=re.M)
    found = {name: (kind, default) for name, kind, default in rows}
    fields = leaves(RunConfig)
    sections = {f"task.{name}" for name in ("score", "generate", "label", "embed", "quota")}
    assert set(found) == set(fields) | sections | {"sid", "text"}
    assert found["engine.dtype"] == ("`float32`, `bfloat16`", "`float32`")
    assert found["task.k"] == ("integer, ≥ 1 and ≤ 100000", "`20`")
    assert found["inputs.users"] == ("string or object", "required")  # {table: NAME}
    for name, field in fields.items():
        assert (found[name][1] == "required") == field.is_required(), name


def leaves(model, before: str = "") -> dict[str, Any]:
    """Every plain setting by its dotted name."""
    out = {}
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = [k for k in kinds if hasattr(k, "model_fields")]
        out |= leaves(inner[0], f"{before}{name}.") if inner else {f"{before}{name}": field}
    return out


def test_the_defaults_that_the_configuration_page_gives_are_the_schemas():
    page = (DOCS / "configuration.md").read_text()
    documented = dict(re.findall(r"^\| `([a-z_.0-9]+)` \| ([^|]*?) \|", page, flags=re.M))
    for name, field in leaves(RunConfig).items():
        default, text = field.default, documented[name].strip("`")
        if isinstance(default, bool):
            assert text == str(default).lower(), name
        elif isinstance(default, int | float):
            assert float(text) == default, name
        elif isinstance(default, str) and default:
            assert text == default, name
        elif default in ("", ()):
            assert text in ("empty", "none"), name


# --- what pages show ------------------------------------------------------------------------------

COMPLETE = {
    "surface": "home",
    "engine": {"backend": "fake"},
    "sid": {"sizes": [8, 8], "tokens": ["<a_{code}>", "<b_{code}>"]},
    "prompt": {"template": "x"},
    "inputs": {"users": "users.parquet", "catalog": "catalog.parquet"},
    "task": {"generate": {}},
    "output": {"path": "out"},
}


def merged(base: dict, over: dict) -> dict:
    out = dict(base)
    for key, value in over.items():
        deeper = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if deeper else value
    return out


CONFIGS = [(page, text) for page in PAGES for _, text in blocks(page, "yaml")]


@pytest.mark.parametrize(
    ("page", "text"), CONFIGS, ids=[f"{p.name}-{n}" for n, (p, _) in enumerate(CONFIGS)]
)
def test_a_configuration_in_a_page_is_valid(tmp_path, page, text):
    shown = yaml.safe_load(text)
    whole = shown if "surface" in shown else merged(COMPLETE, shown)
    engine = shown.get("engine", {})
    if "model" in engine and "backend" not in engine and "surface" not in shown:
        whole["engine"].pop("backend", None)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(whole))
    assert load_config(path).surface


INLINE = sorted(
    {
        words
        for page in PAGES
        for words in re.findall(r"`(nightshelf [a-z][^`]*)`", page.read_text().replace("\n", " "))
    }
)


@pytest.mark.parametrize("words", INLINE)
def test_a_command_named_in_a_sentence_exists(words):
    command = typer.main.get_command(app)
    first, *rest = words.split()[1:]
    for name in first.split("|"):
        found = command.commands[name]
        if isinstance(found, typer.core.TyperGroup) and rest:
            assert set(rest[0].split("|")) <= set(found.commands)
        elif rest:
            options = {o for p in found.params for o in p.opts} | {"--", "--help"}
            assert {w.split("=")[0].rstrip(",;.") for w in rest if w.startswith("--")} <= options


def test_make_targets_and_scripts_that_pages_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for page in PAGES:
        for _, text in blocks(page, "sh"):
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["make"]:
                    assert words[1] in targets, line
                scripts = [w for w in words if w.endswith(".py") and "/" in w and "://" not in w]
                assert all((ROOT / script).exists() for script in scripts), line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_in_a_page_compiles(page):
    for _, text in blocks(page, "python"):
        compile(text, page.name, "exec")


def test_the_tutorial_does_what_it_says(nightshelf, tmp_path, monkeypatch):
    page = DOCS / "tutorial.md"
    monkeypatch.chdir(tmp_path)
    for _, text in blocks(page, "python"):
        exec(compile(text, page.name, "exec"), {})
    for title, text in blocks(page, "yaml"):
        name = re.search(r'title="([^"]+)"', title)[1]
        Path(name).write_text(text)
    said = {}
    for _, text in blocks(page, "sh"):
        for line in text.splitlines():
            if line.startswith("nightshelf "):
                words = shlex.split(line, comments=True)[1:]
                said[words[0]] = nightshelf(*words).out
    assert set(said) == {"plan", "run", "show", "status", "rollback", "evaluate"}
    assert "Film " in said["show"]
    rows = pl.read_parquet("table/ds=2026-11-28/surface=home/*.parquet")
    assert (len(rows), rows["rank"].max()) == (500, 10), "the ten are back"
    assert "by country" in said["evaluate"]

"""The documentation is true: commands parse, settings, exit codes and file names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from jobs.cli.app import app
from schemas import errors
from schemas.config_file import load_config
from schemas.settings import RunConfig
from schemas.tables import QUARANTINE, outcomes_schema, recommendations_schema

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")]
COMMAND = typer.main.get_command(app)


def commands() -> list[str]:
    """Lines of code blocks that call nightshelf, comments and redirections cut off."""
    lines = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.S):
            lines += [line for line in block.splitlines() if line.startswith("nightshelf ")]
    return lines


def test_the_documented_commands_are_all_there():
    assert len(commands()) >= 5


@pytest.mark.parametrize("line", commands())
def test_a_documented_command_parses(line):
    words = shlex.split(line, comments=True)[1:]
    words = words[: words.index(">")] if ">" in words else words
    command = COMMAND
    while isinstance(command, typer.core.TyperGroup):
        name, *words = words
        command = command.commands[name]
    command.make_context(name, words)


def leaves(group: typer.core.TyperGroup, before: str = "") -> dict[str, typer.core.TyperCommand]:
    """Commands by all their words, `catalog check`."""
    found = {}
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            assert command.help
            found |= leaves(command, f"{before}{name} ")
        else:
            found[before + name] = command
    return found


def test_every_command_is_documented_and_has_help():
    manual = (ROOT / "docs/manual.md").read_text()
    for name, command in leaves(COMMAND).items():
        assert f"nightshelf {name} " in manual, f"the manual does not show {name}"
        assert command.help
        for parameter in command.params:
            if isinstance(parameter, typer.core.TyperOption) and parameter.name != "help":
                assert parameter.help, f"{name} --{parameter.name} has no help"


def settings(model: type[BaseModel], before: str = "") -> list[str]:
    names = []
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        names += settings(inner[0], f"{before}{name}.") if inner else [before + name]
    return names


def test_every_setting_is_documented_and_nothing_else():
    page = (ROOT / "docs/configuration.md").read_text()
    documented = set(re.findall(r"^\| `([a-z_.0-9]+)` \|", page, flags=re.M))
    sections = {"task.score", "task.generate", "task.quota", "task.label", "task.embed"}
    assert documented - sections == set(settings(RunConfig))


def test_every_exit_code_is_documented():
    manual = (ROOT / "docs/manual.md").read_text()
    codes = {e.exit_code for e in vars(errors).values() if hasattr(e, "exit_code")} - {1}
    for code in codes:
        assert re.search(rf"^\| {code} \|", manual, flags=re.M), f"exit code {code}"


def test_every_column_is_documented():
    page = (ROOT / "docs/tables.md").read_text()
    columns = [
        *recommendations_schema("string", "string").names,
        *outcomes_schema("string").names,
        *QUARANTINE.names,
    ]
    missing = [name for name in columns if not re.search(rf"\b{name}\b", page)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("config", sorted(ROOT.glob("examples/*/*.yaml")), ids=lambda p: p.name)
def test_example_configurations_are_valid(config):
    assert load_config(config).surface


def test_every_target_of_the_makefile_has_help():
    text = (ROOT / "Makefile").read_text()
    named = set(re.search(r"^\.PHONY: (.*)$", text, flags=re.M)[1].split())
    assert named == set(re.findall(r"^([a-z]+):.*## ", text, flags=re.M))

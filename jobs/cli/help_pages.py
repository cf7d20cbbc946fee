"""What `--help` shows besides each command's own words: panels, examples, exit codes.

Commands are registered where they are written; here they get their place among each other.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_name

from jobs.cli.usage import said_in_json

# Panel -> its commands, in the order of the page; with each, what a person types first.
_PANELS: dict[str, dict[str, tuple[str, ...]]] = {
    "Set up and check": {
        "init": (
            "init --users users.parquet --catalog catalog.parquet --model checkpoints/onerec",
        ),
        "doctor": ("doctor",),
        "validate": ("validate my.yaml",),
        "catalog": (),
        "schema": ("schema > nightshelf.schema.json",),
    },
    "Run": {
        "run": (
            "run my.yaml --ds 2026-11-28",
            "run my.yaml --set task.k=50 --set run.workers=4",
            "run my.yaml --output json | tail -1 | jq .report",
        ),
        "plan": ("plan my.yaml --ds 2026-11-28",),
        "backfill": ("backfill my.yaml --from 2026-11-01 --to 2026-11-28 --max-active 2",),
        "status": ("status my.yaml", "status runs/2026-11-28-home-0d6c1f3a52b7"),
    },
    "Look and judge": {
        "report": (
            "report my.yaml --ds 2026-11-28",
            "report runs/2026-11-28-home-0d6c1f3a52b7 --user U1 --user U2",
        ),
        "show": ("show my.yaml --ds 2026-11-28 --user U1",),
        "evaluate": ("evaluate my.yaml --truth clicks.parquet",),
        "compare": ("compare runs/RUN_A runs/RUN_B",),
    },
    "Steps of a run, one by one": {
        "prepare": ("prepare my.yaml --ds 2026-11-28 --output json",),
        "score": ("score my.yaml --run-id 2026-11-28-home-0d6c1f3a52b7",),
        "audit": (
            "audit runs/2026-11-28-home-0d6c1f3a52b7",
            "audit my.yaml --ds 2026-11-28 --published",
        ),
        "publish": ("publish runs/2026-11-28-home-0d6c1f3a52b7",),
    },
    "Published tables": {
        "rollback": (
            "rollback my.yaml --ds 2026-11-28",
            "rollback my.yaml --ds 2026-11-28 --serve-from 2026-11-27",
        ),
        "unpublish": ("unpublish my.yaml --ds 2026-11-28",),
        "export": ("export my.yaml --ds 2026-11-28 --to shelves/ --format arrow",),
        "gc": ("gc my.yaml --dry-run", "gc my.yaml --keep 2 --keep-days 14"),
    },
}
_REST = "More"
_EPILOG = (
    "Exit codes: 0 published · 2 usage or configuration · 3 an input breaks its contract · "
    "4 some shards failed, running again is safe · 5 the engine cannot start · 6 the audit refused "
    "· 130 interrupted · 143 asked to end by SIGTERM"
    "\n\n"
    "Start with `nightshelf init`, which writes a configuration for your tables; then "
    "`nightshelf plan my.yaml` and `nightshelf run my.yaml`."
)


class _PlainCommand(TyperCommand):
    """A flag is a flag: no `<bool>` beside it."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, flags without the name of a type."""
        return _plain(super().get_params(ctx))


class _PlainGroup(TyperGroup):
    """The same for a command that has commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, flags without the name of a type."""
        return _plain(super().get_params(ctx))


class _Root(_PlainGroup):
    """The command itself, whose usage errors are said in JSON where that is asked for."""

    def make_context(self, info_name: Any, args: list[str], *more: Any, **extra: Any) -> Any:
        """Read the options before the command's name."""
        self._line = list(args)
        with said_in_json(self._line):
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Read the command's own line, and run it."""
        with said_in_json(self._line):
            return super().invoke(ctx)


def _plain(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def arrange(app: typer.Typer) -> None:
    """Give every command its panel, its examples, and its place in the list."""
    places = {name: (panel, examples) for panel, commands in _PANELS.items()
              for name, examples in commands.items()}  # fmt: skip
    order = {name: index for index, name in enumerate(places)}

    def name_of(info: typer.models.CommandInfo) -> str:
        assert info.callback is not None, "a command is a function"
        return info.name or get_command_name(info.callback.__name__)

    for command in app.registered_commands:
        panel, examples = places.get(name_of(command), (_REST, ()))
        command.rich_help_panel = panel
        command.epilog = command.epilog or _examples(examples)
        command.cls = _PlainCommand
    app.registered_commands.sort(key=lambda info: order.get(name_of(info), len(order)))
    for group in app.registered_groups:
        group.rich_help_panel = places.get(str(group.name), (_REST, ()))[0]
        assert group.typer_instance is not None, "a group has commands"
        for command in group.typer_instance.registered_commands:
            command.cls = _PlainCommand
        group.cls = _PlainGroup
    app.info.epilog = _EPILOG
    app.info.cls = _Root


def _examples(lines: tuple[str, ...]) -> str | None:
    if not lines:
        return None
    return "\n".join(["Examples:", *(f"  nightshelf {line}" for line in lines)])

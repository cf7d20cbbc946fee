"""`nightshelf init`: a commented configuration from the user's own tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from jobs.cli.options import Output, OutputOption, guarded, maybe_place_option, place_option, stdout
from pipelines.propose import Sources, propose_config
from pipelines.storage import files
from schemas.errors import ConfigError


@guarded
def init(
    users: Annotated[
        str, typer.Option(metavar="PATH", callback=place_option, help="The users table.")
    ],
    catalog: Annotated[
        str, typer.Option(metavar="PATH", callback=place_option, help="The catalog, in any layout.")
    ],
    candidates: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", callback=maybe_place_option, help="Items to score; without, search."
        ),
    ] = None,
    exclusions: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", callback=maybe_place_option, help="Items never to recommend, per user."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="The checkpoint; without, the fake backend.")
    ] = None,
    projector: Annotated[
        str | None, typer.Option(metavar="DIR", help="The projector of user vectors.")
    ] = None,
    surface: Annotated[str, typer.Option(help="Where the items are shown.")] = "home",
    config: Annotated[
        str, typer.Option("-o", "--config", metavar="FILE", help="The file to write.")
    ] = "nightshelf.yaml",
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file that is there.")
    ] = False,
    output: OutputOption = Output.text,
) -> None:
    """Write a commented configuration for your own tables."""

    target = Path(config)
    if target.exists() and not force:
        raise ConfigError(
            "the file is there already",
            got=config,
            do="Give another name with -o, or --force to write over it.",
        )
    sources = Sources(
        users=users,
        catalog=catalog,
        candidates=candidates,
        exclusions=exclusions,
        model=model,
        projector=projector,
        surface=surface,
    )
    text = propose_config(sources, str(target.resolve().parent))
    files.write_bytes(str(target.resolve()), text.encode())
    if output is Output.json:
        typer.echo(json.dumps({"status": "written", "config": config}))
        return
    _say_next(config)


def _say_next(config: str) -> None:
    console = stdout()
    console.print(f"wrote {escape(config)}; its comments say what was guessed. Next:")
    for command in ("validate", "run"):
        console.print(f"  nightshelf {command} {escape(config)}", highlight=False)

"""The command that publishes an older run again."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from jobs.options import ConfigArg, DebugOption, DsOption, Output, OutputOption, SetOption, guard
from pipelines.publish.rollback import rollback as publish_older
from schemas.config_file import load_config


def rollback(
    config: ConfigArg,
    ds: DsOption = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN_ID", help="Which run; default: the one before."),
    ] = None,
    set_: SetOption = None,
    output: OutputOption = Output.text,
    debug: DebugOption = False,
) -> None:
    """Publish an older run of a date and surface again.

    Nothing is scored.
    """

    def body() -> None:
        published = publish_older(load_config(config, overrides=set_, ds=ds), run)
        if output is Output.json:
            typer.echo(json.dumps({"status": "published", **published.model_dump(mode="json")}))
            return
        typer.echo(
            f"{published.partition} of {published.table} holds run {published.run_id} now: "
            f"{published.rows:,} rows"
        )

    guard(body, output, debug)

"""The commands that take back what is published."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from jobs.cli.options import (
    ConfigArg,
    DsOption,
    Output,
    OutputOption,
    SetOption,
    guarded,
)
from pipelines.publish.rollback import rollback as publish_older
from pipelines.publish.rollback import serve_from as serve_other
from pipelines.publish.rollback import unpublish as take_back
from schemas.config_file import load_config
from schemas.errors import ConfigError


@guarded
def rollback(
    config: ConfigArg,
    ds: DsOption = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN_ID", help="Which run; default: the one before."),
    ] = None,
    serve_from: Annotated[
        str | None,
        typer.Option(
            "--serve-from", metavar="YYYY-MM-DD", help="Serve the rows of another date instead."
        ),
    ] = None,
    set_: SetOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Publish an older run of a date and surface again.

    Nothing is scored. The run that was visible stays withdrawn until a person publishes it.
    """

    settings = load_config(config, overrides=set_, ds=ds)
    if run is not None and serve_from is not None:
        raise ConfigError(
            "--run and --serve-from are two ways back", do="Give one of them.", field="--run"
        )
    if serve_from is not None:
        published = serve_other(settings, serve_from)
    else:
        published = publish_older(settings, run)
    if output is Output.json:
        typer.echo(json.dumps({"status": "published", **published.model_dump(mode="json")}))
        return
    typer.echo(
        f"{published.partition} of {published.table} holds run {published.run_id} now: "
        f"{published.rows:,} rows"
    )


@guarded
def unpublish(
    config: ConfigArg,
    ds: DsOption = None,
    set_: SetOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Take back what is published: readers find nothing there.

    The run stays withdrawn until a person publishes it again.
    """

    settings = load_config(config, overrides=set_, ds=ds)
    before = take_back(settings)
    run_id = None if before is None else before.run_id
    if output is Output.json:
        found = {"status": "unpublished", "ds": settings.ds, "surface": settings.surface}
        typer.echo(json.dumps({**found, "withdrawn": run_id}))
    elif run_id is None:
        typer.echo(f"nothing was published for ds {settings.ds}, surface {settings.surface!r}")
    else:
        typer.echo(
            f"nothing is published for ds {settings.ds}, surface {settings.surface!r} now; "
            f"run {run_id} is withdrawn"
        )

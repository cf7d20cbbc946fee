"""That no place a run writes to lies in one that it reads, nor in another that it writes to.

The first night of such a run is fine; the next reads what the first wrote.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from itertools import combinations

from fsspec.implementations.local import LocalFileSystem

from pipelines.storage.files import filesystem
from schemas.errors import ConfigError
from schemas.input_tables import IcebergInput
from schemas.settings import TABLE, RunConfig

Parts = tuple[str, ...]


def overlapping(config: RunConfig) -> Iterator[ConfigError]:
    """An error for each pair of places of which one lies in the other, by where they really are."""
    output, run = config.output, config.run
    written = {"output.path": output.path, "run.work_dir": run.work_dir}
    if output.quarantine is not None and output.format != "iceberg":
        written["output.quarantine"] = output.quarantine
    pairs = list(combinations(written, 2))
    if run.metrics_dir is not None:
        written["run.metrics_dir"] = run.metrics_dir
        pairs.append(("run.metrics_dir", "output.path"))
    places = {name: _parts(path) for name, path in written.items()}
    for one, other in pairs:
        if _is_within(places[one], places[other]) or _is_within(places[other], places[one]):
            yield _overlap(one, written[one], other, written[other])
    copies = (*places["run.work_dir"], "tables")  # inputs that the run itself put there
    for name, path in _read(config):
        read = _parts(path)
        for target, place in places.items():
            if target == "run.work_dir" and _is_within(read, copies):
                continue
            if _is_within(place, read) or _is_within(read, place):
                yield _overlap(target, written[target], name, path)


def _read(config: RunConfig) -> Iterator[tuple[str, str]]:
    for name, path in config.inputs.paths.items():
        source = getattr(config.inputs, name)
        named = isinstance(source, IcebergInput) and source.is_name
        if path is not None and not path.startswith(TABLE) and not named:
            yield f"inputs.{name}", path
    for name, path in (
        ("engine.model", config.engine.model),
        ("engine.projector", config.engine.projector),
    ):
        if path is not None:
            yield name, path


def _parts(path: str) -> Parts:
    """Where a path leads, part by part: through links, without slashes at its end."""
    fs, inside = filesystem(path)
    if isinstance(fs, LocalFileSystem):
        return ("file", *os.path.realpath(inside).strip("/").split("/"))
    kinds = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    return (min(kinds), *inside.strip("/").split("/"))


def _is_within(path: Parts, folder: Parts) -> bool:
    """Whether a path is a folder or lies in it; parts of the folder may be patterns."""
    if "**" in folder:
        folder = folder[: folder.index("**")]
    return len(path) >= len(folder) and all(
        one == other or fnmatch.fnmatchcase(one, other)
        for one, other in zip(path, folder, strict=False)
    )


def _overlap(one: str, path: str, other: str, there: str) -> ConfigError:
    return ConfigError(
        f"{one} and {other} lie in one another",
        expected="places that hold nothing of each other",
        got=f"{path} and {there}",
        do=f"Choose another folder for {one}: what one night writes there, the next would read as "
        "its own input, or remove.",
        field=one,
    )

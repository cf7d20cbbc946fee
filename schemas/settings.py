"""A run's configuration: one YAML file, checked whole before anything starts.

Unknown keys are errors. Paths are taken relative to the file. `{ds}` and `{surface}` in a path are
replaced, so that one file serves every night. `json_schema()` feeds editors. The sections are in
files of their own; what depends on more than one of them is checked here.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    Field,
    ValidationInfo,
    model_validator,
)

from schemas.engine_settings import EngineSettings, Precision, TrtllmSettings
from schemas.errors import ConfigError, quoted
from schemas.input_settings import (
    TABLES,
    InputSettings,
    PromptSettings,
    SidSettings,
    TextSettings,
)
from schemas.input_tables import TABLE
from schemas.run_settings import (
    AuditSettings,
    LimitedGate,
    OutputSettings,
    ReportSettings,
    RunSettings,
    SparkSettings,
)
from schemas.section import LENIENT, Name, Section
from schemas.semantic_ids import SidSpace
from schemas.task_settings import (
    CollisionPolicy,
    EmbedSettings,
    GenerateSettings,
    LabelSettings,
    LengthNorm,
    Pooling,
    QuotaSettings,
    ScoreNorm,
    ScoreSettings,
    TaskSettings,
)

__all__ = [
    "AuditSettings",
    "CollisionPolicy",
    "EmbedSettings",
    "EngineSettings",
    "GenerateSettings",
    "InputSettings",
    "LENIENT",
    "LabelSettings",
    "LengthNorm",
    "LimitedGate",
    "OutputSettings",
    "Pooling",
    "Precision",
    "PromptSettings",
    "QuotaSettings",
    "ReportSettings",
    "RunConfig",
    "RunSettings",
    "ScoreNorm",
    "ScoreSettings",
    "SidSettings",
    "SparkSettings",
    "TABLE",
    "TABLES",
    "TaskSettings",
    "TextSettings",
    "TrtllmSettings",
    "json_schema",
]

_LONGEST_NAME = 150  # of a surface; file names take 255 bytes and hold more than it
_DS = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
# The same in a path; Azure's container@account holds none. Or a link that was signed.
_SECRET_PATH = re.compile(r"://[^/@\s:]*:[^/@\s]+@|[?&](sig|[^=&]*(signature|token))=", re.I)


def _fits_a_name(surface: str) -> str:
    if len(quote(surface, safe="")) > _LONGEST_NAME:
        raise ValueError(f"too long for a folder's name: at most {_LONGEST_NAME} bytes, escaped")
    return surface


def _known_ds(value: str | None) -> str | None:
    if value is not None:
        if not _DS.fullmatch(value):
            raise ValueError("must be a date like 2026-11-28")
        try:
            dt.date.fromisoformat(value)
        except ValueError as err:
            raise ValueError(f"must be a day of the calendar: {err}") from None
    return value


class RunConfig(Section):
    """The whole file."""

    surface: Annotated[Name, AfterValidator(_fits_a_name)] = Field(
        description="Where the items are shown"
    )
    ds: Annotated[str | None, AfterValidator(_known_ds)] = Field(
        None, description="Partition date, YYYY-MM-DD; --ds wins"
    )
    engine: EngineSettings = EngineSettings()
    sid: SidSettings | None = Field(None, description="Items are named by semantic IDs")
    text: TextSettings | None = Field(None, description="Items are named by their text")
    prompt: PromptSettings
    inputs: InputSettings
    task: TaskSettings
    output: OutputSettings
    run: RunSettings = RunSettings()
    spark: SparkSettings = SparkSettings()
    audit: AuditSettings = AuditSettings()
    report: ReportSettings = ReportSettings()

    @property
    def space(self) -> SidSpace:
        """The SID space; `ConfigError` where items are named by text."""
        if self.sid is None:
            raise ConfigError("this needs semantic IDs", expected="a sid section", got="none")
        return self.sid.space

    @property
    def needs_items(self) -> bool:
        """Whether the run reads a catalog. Only embeddings of prompts without history do not."""
        return self.task.gives_lists or self.prompt.parsed.uses("history")

    @property
    def reads_history(self) -> bool:
        """Whether the users column `history` is read: for the prompt, or to leave its items out."""
        return self.task.exclude_history or self.prompt.parsed.uses("history")

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> RunConfig:
        if not (info.context or {}).get(LENIENT):
            for conflict in self.conflicts():
                raise conflict
        return self

    def conflicts(self) -> Iterator[ConfigError]:
        """Settings that do not fit together, each as the error it is."""
        if "{ds}" in self.run.work_dir:
            yield ConfigError(
                "run.work_dir depends on the date",
                expected="one folder for all dates: runs have folders of their own in it",
                got=self.run.work_dir,
                field="run.work_dir",
            )
        if self.spark.register_table is not None and self.output.format != "parquet":
            yield ConfigError(
                "spark.register_table is for Parquet; other formats have catalogs of their own",
                expected="output.format: parquet",
                got=self.output.format,
                field="spark.register_table",
            )
        yield from self._check_paths()
        _ = self.task.eligible
        yield from self._check_items()
        yield from self.task.conflicts(self)

    def _check_paths(self) -> Iterator[ConfigError]:
        """No path holds credentials: the configuration is kept with every run."""
        paths = {f"inputs.{name}": path for name, path in self.inputs.paths.items()} | {
            "engine.model": self.engine.model,
            "engine.projector": self.engine.projector,
            "output.path": self.output.path,
            "output.quarantine": self.output.quarantine,
            "run.work_dir": self.run.work_dir,
            "run.metrics_dir": self.run.metrics_dir,
        }
        folders = set(self.surface.split("/")) & {".", ".."}
        for name, path in paths.items():
            if path is not None and folders and "{surface}" in path:
                yield ConfigError(
                    f"{name} would lead out of its place",
                    expected="a surface without . and .. where {surface} is in a path",
                    got=quoted(self.surface),
                    field="surface",
                )
            if path is not None and _SECRET_PATH.search(path):
                yield ConfigError(
                    f"{name} holds what looks like a credential",
                    expected="a path without user, password or signature",
                    do="Give credentials to fsspec by the environment, such as AWS_PROFILE.",
                    field=name,
                )

    def _check_items(self) -> Iterator[ConfigError]:
        """How items are named, and that there is a catalog of them."""
        template = self.prompt.parsed
        if self.sid is not None:
            _ = self.sid.space
        if self.sid is not None and self.text is not None:
            yield ConfigError(
                "items are named twice", expected="a sid or a text section, not both", field="text"
            )
        if self.needs_items and self.sid is None and self.text is None:
            yield ConfigError(
                "nothing names the items to the model",
                expected="a sid section (semantic IDs), or a text section",
                field="sid",
            )
        if self.needs_items and self.inputs.catalog is None:
            yield ConfigError(
                "inputs.catalog is missing", expected="the table of items", field="inputs.catalog"
            )
        if template.uses("user_sid") and self.sid is None:
            yield ConfigError(
                "prompt.template has {user_sid} but there is no sid section", field="sid"
            )


def json_schema() -> dict[str, Any]:
    """JSON Schema of a run configuration."""
    return RunConfig.model_json_schema()

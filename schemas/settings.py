"""A run's configuration: one YAML file, checked whole before anything starts.

Unknown keys are errors. Paths are taken relative to the file. `{ds}` and `{surface}` in a path are
replaced, so that one file serves every night. `json_schema()` feeds editors.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from schemas.eligibility import Expression, parse_eligibility
from schemas.errors import ConfigError, quoted
from schemas.semantic_ids import SidSpace
from schemas.templates import PromptTemplate, parse_template

ScoreNorm = Literal["full_vocab", "sid_range", "level", "trie"]
CollisionPolicy = Literal["all", "most_popular", "first"]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]

_DS = re.compile(r"^\d{4}-\d{2}-\d{2}$")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class EngineSettings(_Section):
    """What runs the model, and how much it may take at once."""

    backend: str = Field("torch", description="fake | torch; see engine/registry.py")
    model: str | None = Field(
        None, description="Checkpoint folder: config.json, tokenizer.json, *.safetensors"
    )
    projector: str | None = Field(
        None, description="Folder with projector.json and projector.safetensors for {user_vector}"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Model precision")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: CUDA when there is one"
    )
    max_batch_tokens: Positive = Field(
        8192, description="Rows (prompt tokens, tree nodes, beams) in one packed pass"
    )
    max_batch_users: Positive = Field(256, description="Users in one packed pass")
    seed: int = Field(0, description="Seed of the fake backend")


class SidSettings(_Section):
    """The SID space. `tokens[l]` is the text of level l's tokens with `{code}` for the number."""

    sizes: tuple[Positive, ...] = Field(
        min_length=1, max_length=16, description="Codes of each level"
    )
    tokens: tuple[str, ...] = Field(
        min_length=1, max_length=16, description="Text of each level's tokens, with {code}"
    )

    @property
    def space(self) -> SidSpace:
        """The space these settings describe."""
        return SidSpace(self.sizes, self.tokens)


class PromptSettings(_Section):
    """The prompt of one user; see schemas/templates.py for the slots."""

    template: str = Field(description="Text with slots; see schemas/templates.py")
    max_tokens: Positive = Field(1024, description="Longest prompt; the oldest history goes first")
    history_max_items: Positive = Field(50, description="Latest items kept in {history}")
    history_separator: str = Field("", description="Text between two items of {history}")
    null_text: str | None = Field(
        None, description="Written for a null text or scalar; when unset the row is quarantined"
    )

    @property
    def parsed(self) -> PromptTemplate:
        """The template's segments."""
        return parse_template(self.template)


class InputSettings(_Section):
    """Where the tables are: a Parquet file, a folder of them, or a glob."""

    users: str = Field(description="user_id and what the template names")
    catalog: str = Field(description="item_id, sid; optional popularity, title, text")
    candidates: str | None = Field(None, description="Items to score, for task.score")
    exclusions: str | None = Field(None, description="user_id, item_id: never recommended")


class ScoreSettings(_Section):
    """Score the candidate sets of the candidates table."""


class GenerateSettings(_Section):
    """Beam search over the catalog."""

    width: Positive | tuple[Positive, ...] = Field(
        64, description="Beams kept per level: one number, or one per level"
    )
    exact: bool = Field(False, description="Widen users whose top-k is not certified")
    max_width: Positive = Field(4096, description="Widest beam that exact may use")

    def widths(self, num_levels: int) -> tuple[int, ...]:
        """Width of each level that is forwarded (all but the last)."""
        if isinstance(self.width, int):
            return (self.width,) * max(num_levels - 1, 1)
        if len(self.width) < num_levels - 1:
            raise ConfigError(
                "task.generate.width is too short",
                expected=f"one number, or at least {num_levels - 1} (levels of the SID space - 1)",
                got=quoted(list(self.width)),
            )
        return tuple(self.width)


class QuotaSettings(_Section):
    """Diversity: at most so many items of a list share the first `level` codes."""

    level: Literal[1, 2] = Field(1, description="Codes that make items alike")
    max_items: Positive = Field(description="Most items of one list that share them")


class TaskSettings(_Section):
    """What to compute for each user. Give `score: {}`, `generate: {}` or both."""

    k: Positive = Field(20, description="Recommendations per user")
    k_column: str | None = Field(
        None, description="Users column with this user's k, 1 to task.k; null there means task.k"
    )
    score_norm: ScoreNorm = Field("full_vocab", description="What p is a softmax over")
    collisions: CollisionPolicy = Field("all", description="Items kept of those that share one SID")
    quota: QuotaSettings | None = Field(None, description="Most items alike in one list")
    eligibility: str | None = Field(
        None, description="Items a user may get, by catalog attributes; see schemas/eligibility.py"
    )
    score: ScoreSettings | None = Field(None, description="{}: score the candidates")
    generate: GenerateSettings | None = Field(None, description="{…}: search the catalog")

    @property
    def eligible(self) -> Expression | None:
        """The eligibility expression."""
        return None if self.eligibility is None else parse_eligibility(self.eligibility)

    @model_validator(mode="after")
    def _some_task(self) -> TaskSettings:
        if self.score is None and self.generate is None:
            raise ValueError("task needs 'score: {}', 'generate: {}' or both")
        return self


class OutputSettings(_Section):
    """Where recommendations are published."""

    path: str = Field(description="Root of the table; partitions ds=…/surface=… below it")
    format: Literal["parquet"] = Field("parquet", description="Table format")
    layout: Literal["long", "wide"] = Field(
        "long", description="long: a row per recommendation; wide: a row per user"
    )


class RunSettings(_Section):
    """How a run is cut up and launched."""

    work_dir: str = Field("runs", description="Folder of run folders")
    shard_users: Positive = Field(5000, description="Users per shard, about")
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto", description="Worker processes; auto: one per GPU, else one; 0: in this process"
    )
    max_attempts: Positive = Field(3, description="Tries of a shard whose worker dies")
    shard_timeout_s: Annotated[float, Field(gt=0)] = Field(
        3600.0, description="A worker that reports nothing for this long is ended"
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = Field(
        1800.0, description="A worker whose engine takes longer to start is ended"
    )


class AuditSettings(_Section):
    """Gates between scoring and publishing. Conservation, duplicates, catalog validity, excluded
    items and scores are always checked and always refuse."""

    min_coverage: Share = Field(0.0, description="Least share of users that got a recommendation")
    max_quarantine_rate: Share = Field(0.5, description="Largest share of users quarantined")


def _known_ds(value: str | None) -> str | None:
    if value is not None:
        if not _DS.match(value):
            raise ValueError("must be a date like 2026-11-28")
        dt.date.fromisoformat(value)
    return value


class RunConfig(_Section):
    """The whole file."""

    surface: Annotated[str, Field(min_length=1)] = Field(description="Where the items are shown")
    ds: Annotated[str | None, AfterValidator(_known_ds)] = Field(
        None, description="Partition date, YYYY-MM-DD; --ds wins"
    )
    engine: EngineSettings = EngineSettings()  # type: ignore[call-arg]
    sid: SidSettings
    prompt: PromptSettings
    inputs: InputSettings
    task: TaskSettings
    output: OutputSettings
    run: RunSettings = RunSettings()  # type: ignore[call-arg]
    audit: AuditSettings = AuditSettings()  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        template = self.prompt.parsed
        _ = self.sid.space, self.task.eligible
        quota = self.task.quota
        if quota is not None and quota.level > len(self.sid.sizes):
            raise ConfigError(
                "task.quota.level is deeper than the semantic IDs",
                expected=f"at most {len(self.sid.sizes)}",
                got=str(quota.level),
            )
        if self.task.generate is not None:
            self.task.generate.widths(len(self.sid.sizes))
        if self.task.score is not None and self.inputs.candidates is None:
            raise ConfigError("task.score needs inputs.candidates", got="none")
        runs_a_model = self.engine.backend in ("torch", "trtllm")
        if runs_a_model and self.engine.model is None:
            raise ConfigError(
                f"engine.model is missing for backend {self.engine.backend!r}",
                expected="a checkpoint folder",
            )
        needs_projector = template.uses("user_vector") and runs_a_model
        if needs_projector and self.engine.projector is None:
            raise ConfigError("prompt.template has {user_vector} but engine.projector is unset")
        return self


def json_schema() -> dict[str, Any]:
    """JSON Schema of a run configuration."""
    return RunConfig.model_json_schema()

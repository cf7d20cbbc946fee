"""A run's configuration: one YAML file, checked whole before anything starts.

Unknown keys are errors. Paths are taken relative to the file. `{ds}` and `{surface}` in a path are
replaced, so that one file serves every night. `json_schema()` feeds editors.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from schemas.eligibility import Expression, parse_eligibility
from schemas.errors import ConfigError, quoted
from schemas.semantic_ids import SidSpace
from schemas.templates import PromptTemplate, parse_template

ScoreNorm = Literal["full_vocab", "sid_range", "level", "trie"]
CollisionPolicy = Literal["all", "most_popular", "first"]
LengthNorm = Literal["sum", "mean"]
Pooling = Literal["last", "mean"]
LimitedGate = Literal[
    "coverage",
    "quarantine_rate",
    "rows_min",
    "rows_p5",
    "exact_share",
    "legal_mass",
    "score_drift",
    "overlap",
    "row_change",
]
Positive = Annotated[int, Field(ge=1, strict=True)]  # true is no number
Share = Annotated[float, Field(ge=0.0, le=1.0)]

TABLES = ("users", "catalog", "candidates", "exclusions")
LENIENT = "lenient"  # validation context: settings that do not fit together are left to `conflicts`
_LONGEST_NAME = 150  # of a surface; file names take 255 bytes and hold more than it
_DS = re.compile(r"^\d{4}-\d{2}-\d{2}$")
_SECRET_KEY = re.compile(
    r"secret|passw|token|credential|(access|private|account)[-_.]?key|signature|connection.string",
    re.I,
)
_SECRET_VALUE = re.compile(r"://[^/@\s]+@")  # user:password@ in a URL
# The same in a path; Azure's container@account holds none. Or a link that was signed.
_SECRET_PATH = re.compile(r"://[^/@\s:]*:[^/@\s]+@|[?&](sig|[^=&]*(signature|token))=", re.I)


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


class TrtllmSettings(_Section):
    """How TensorRT-LLM's engines are built; only `engine.backend: trtllm` reads it."""

    max_num_tokens: Positive | Literal["auto"] = Field(
        "auto", description="Tokens of one encode call; auto: what the GPU holds"
    )
    max_batch_size: Positive = Field(256, description="Prompts of one encode call")
    multi_item: Literal["auto", "off"] = Field(
        "auto", description="Many items behind one prompt; off: one prompt per item"
    )
    plugin: Literal["auto", "off"] = Field(
        "auto", description="Our Qwen3 model inside TensorRT-LLM: soft tokens, head on demand"
    )
    kv_cache_dtype: Literal["auto", "fp8", "nvfp4"] = Field(
        "auto", description="Precision of the KV cache of task.generate.mode native"
    )
    placeholder_id: Annotated[int, Field(ge=0, strict=True)] | None = Field(
        None, description="Token that stands for a soft token; unset: the last id without a text"
    )


class EngineSettings(_Section):
    """What runs the model, and how much it may take at once."""

    backend: str = Field("torch", description="fake | torch | trtllm; see engine/registry.py")
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
    max_batch_tokens: Positive | Literal["auto"] = Field(
        "auto",
        description="Rows (prompt tokens, tree nodes, beams) packed together; auto: what the GPU "
        "holds, 8192 on a CPU",
    )
    max_batch_users: Positive = Field(256, description="Users in one packed pass")
    tensor_parallel: Positive = Field(1, description="GPUs of one worker and its engine; trtllm")
    seed: int = Field(0, description="Seed of the fake backend")
    trtllm: TrtllmSettings = Field(
        TrtllmSettings(),  # type: ignore[call-arg]
        description="How TensorRT-LLM's engines are built",
    )


class SidSettings(_Section):
    """The SID space. `tokens[l]` is the text of level l's tokens with `{code}` for the number."""

    sizes: tuple[Positive, ...] = Field(
        min_length=1, max_length=16, description="Codes of each level"
    )
    tokens: tuple[str, ...] = Field(
        min_length=1, max_length=16, description="Text of each level's tokens, with {code}"
    )
    end_token: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Token that ends a semantic ID; lets one be a prefix of another"
    )
    end_after: Literal["prefix", "every"] = Field(
        "prefix", description="Which SIDs end_token closes: those that are a prefix, or every one"
    )

    @property
    def space(self) -> SidSpace:
        """The space these settings describe."""
        return SidSpace(self.sizes, self.tokens, self.end_token)

    @model_validator(mode="after")
    def _end(self) -> SidSettings:
        if self.end_after == "every" and self.end_token is None:
            raise ValueError("sid.end_after: every needs sid.end_token")
        return self


class TextSettings(_Section):
    """Items that have no semantic ID: a text of the catalog names them to the model."""

    column: Annotated[str, Field(min_length=1)] = Field(
        "text", description="Catalog column with the text"
    )
    max_tokens: Positive = Field(64, description="Longest text; a longer one is an error, not cut")


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


TABLE = "table:"  # how an input says that it is a table of Spark's catalog, and no path


def _table_name(value: Any) -> Any:
    """`{table: db.users}` as text, `table:db.users`."""
    if not isinstance(value, dict):
        return value
    name = value.get("table")
    if set(value) != {"table"} or not isinstance(name, str) or not name.strip():
        raise ValueError("must be a path, or {table: NAME} for a table of Spark's catalog")
    return TABLE + name.strip()


_TABLE_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"table": {"type": "string"}},
            "required": ["table"],
            "additionalProperties": False,
        },
    ]
}
Input = Annotated[str, BeforeValidator(_table_name), WithJsonSchema(_TABLE_SCHEMA)]


class InputSettings(_Section):
    """Where the tables are: a Parquet file, a folder of them, or a glob; with Spark also
    `{table: db.users}`, a table of its catalog."""

    users: Input = Field(description="user_id and what the template names")
    catalog: Input | None = Field(
        None,
        description="item_id, sid; optional popularity, title, text; only embed can do without",
    )
    candidates: Input | None = Field(
        None, description="Items to score, for task.score and task.label"
    )
    exclusions: Input | None = Field(None, description="user_id, item_id: never recommended")
    self_contained: bool = Field(
        False,
        description="The users table's files are the shards, with item_ids (candidates) and "
        "excluded_item_ids in columns; nothing is joined",
    )

    @property
    def paths(self) -> dict[str, str | None]:
        """Where each table is."""
        return {name: getattr(self, name) for name in TABLES}

    @property
    def tables(self) -> dict[str, str]:
        """Inputs that are tables of Spark's catalog, by their names there."""
        named = {name: at for name, at in self.paths.items() if at and at.startswith(TABLE)}
        return {name: value.removeprefix(TABLE) for name, value in named.items()}


class ScoreSettings(_Section):
    """Score the candidate sets of the candidates table."""

    length_norm: LengthNorm = Field(
        "sum",
        description="Log-probabilities of an item's tokens: sum, or mean (items named by text)",
    )


class LabelSettings(_Section):
    """Ask the model about each candidate: the probability of labels behind the item's tokens."""

    labels: tuple[StrictStr | StrictInt, ...] = Field(
        min_length=1, description="One token each, as text or id; the first one's score ranks"
    )
    labels_column: str | None = Field(
        None, description="Users column with this user's own labels; null there means labels"
    )
    softmax: bool = Field(
        True, description="Softmax over the labels; false: log p over the whole vocabulary"
    )
    suffix: str = Field("", description="Text between the item and the label")

    @field_validator("labels", mode="before")
    @classmethod
    def _no_booleans(cls, labels: Any) -> Any:
        if isinstance(labels, list | tuple) and any(isinstance(one, bool) for one in labels):
            raise ValueError("YAML reads yes, no, true and false as booleans; put them in quotes")
        return labels

    @model_validator(mode="after")
    def _labels(self) -> LabelSettings:
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("a label stands twice")
        if self.softmax and len(self.labels) == 1:
            raise ValueError(
                "a softmax over one label is 1 for every item; add the other labels, or set "
                "softmax: false"
            )
        return self


class EmbedSettings(_Section):
    """Write the model's hidden state of each user's prompt: an embedding, no recommendations."""

    pooling: Pooling = Field("last", description="last: the prompt's last token; mean: all of them")
    normalize: bool = Field(False, description="Scale each embedding to length 1")


class GenerateSettings(_Section):
    """Beam search over the catalog."""

    width: Positive | tuple[Positive, ...] = Field(
        64, description="Beams kept per level: one number, or one per level"
    )
    exact: bool = Field(False, description="Widen users whose top-k is not certified")
    max_width: Positive = Field(4096, description="Widest beam that exact may use")
    mode: Literal["constrained", "native", "auto"] = Field(
        "constrained", description="native: the engine's own open-vocabulary beams, then filtered"
    )
    rescore: bool = Field(False, description="Score again what native beams found")
    compare_users: Annotated[int, Field(ge=0, strict=True)] = Field(
        0, description="Users of each pass that native beams are compared for"
    )

    @model_validator(mode="after")
    def _mode(self) -> GenerateSettings:
        if self.mode == "constrained" and (self.rescore or self.compare_users):
            raise ValueError("rescore and compare_users are for mode: native or auto")
        if self.mode == "native" and self.exact:
            raise ValueError("mode: native has no certificate; exact: true needs constrained")
        if self.mode == "native" and not isinstance(self.width, int):
            raise ValueError("mode: native has one width for all levels")
        return self

    def widths(self, num_levels: int) -> tuple[int, ...]:
        """Width of each level that is forwarded: all but the last, and that too before an end
        token."""
        if isinstance(self.width, int):
            return (self.width,) * num_levels
        if not num_levels - 1 <= len(self.width) <= num_levels:
            raise ConfigError(
                f"task.generate.width is too {'short' if len(self.width) < num_levels else 'long'}",
                expected=f"one number, or {num_levels - 1} (levels of the SID space - 1)",
                got=quoted(list(self.width)),
                field="task.generate.width",
            )
        return (*self.width, self.width[-1])


class QuotaSettings(_Section):
    """Diversity: at most so many items of a list share the first `level` codes."""

    level: Literal[1, 2] = Field(1, description="Codes that make items alike")
    max_items: Positive = Field(description="Most items of one list that share them")


class TaskSettings(_Section):
    """What to compute for each user: `score`, `generate` or both; or `label`; or `embed`."""

    k: Annotated[Positive, Field(le=100_000)] = Field(20, description="Recommendations per user")
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
    label: LabelSettings | None = Field(None, description="{…}: label the candidates")
    embed: EmbedSettings | None = Field(None, description="{…}: write prompt embeddings")

    @property
    def uses_candidates(self) -> bool:
        """Whether the candidates table is read."""
        return self.score is not None or self.label is not None

    @property
    def eligible(self) -> Expression | None:
        """The eligibility expression."""
        return None if self.eligibility is None else parse_eligibility(self.eligibility)

    @model_validator(mode="after")
    def _some_task(self) -> TaskSettings:
        asked = [
            self.score is not None or self.generate is not None,
            self.label is not None,
            self.embed is not None,
        ]
        if sum(asked) != 1:
            raise ValueError(
                "task needs 'score: {}', 'generate: {}' or both; or 'label: {…}'; or 'embed: {…}'"
            )
        if self.label is not None and self.score_norm != "full_vocab":
            raise ValueError("task.score_norm has no meaning for label; leave it out")
        return self


class OutputSettings(_Section):
    """Where recommendations are published."""

    path: str = Field(description="Root of the table; partitions ds=…/surface=… below it")
    format: Literal["parquet", "iceberg", "delta"] = Field("parquet", description="Table format")
    layout: Literal["long", "wide"] = Field(
        "long", description="long: a row per recommendation; wide: a row per user"
    )
    table: str | None = Field(
        None, description="Iceberg: namespace.table; default nightshelf.recommendations"
    )
    quarantine: str | None = Field(
        None, description="Root of a table for the quarantine; Iceberg: its namespace.table"
    )
    catalog: dict[str, str | bool | int | float] = Field(
        {}, description="Iceberg: pyiceberg catalog properties, without credentials"
    )

    @property
    def table_name(self) -> str:
        """Namespace and table of an Iceberg table."""
        return self.table or "nightshelf.recommendations"

    @model_validator(mode="after")
    def _check_iceberg(self) -> OutputSettings:
        for name, is_set in (("table", self.table is not None), ("catalog", bool(self.catalog))):
            if is_set and self.format != "iceberg":
                raise ConfigError(
                    f"output.{name} is for Iceberg",
                    expected="output.format: iceberg",
                    got=self.format,
                    field=f"output.{name}",
                )
        if len(parts := self.table_name.split(".")) < 2 or not all(parts):
            raise ConfigError(
                "output.table names no table",
                expected="namespace.table",
                got=quoted(self.table),
                field="output.table",
            )
        return self

    @field_validator("catalog", mode="before")
    @classmethod
    def _check_secrets(cls, catalog: Any) -> Any:
        for key, value in catalog.items() if isinstance(catalog, dict) else ():
            if not isinstance(value, str | bool | int | float):
                raise ConfigError(
                    f"output.catalog.{key} is not one value",
                    expected="a string, number or boolean",
                    got=type(value).__name__,
                    field="output.catalog",
                )
            named_so = _SECRET_KEY.search(str(key)) and not isinstance(value, bool)
            if named_so or _SECRET_VALUE.search(str(value)):
                raise ConfigError(
                    f"output.catalog.{key} looks like a credential",
                    expected="no secrets: the configuration is kept with every run",
                    do="Set it in the environment (PYICEBERG_CATALOG__NAME__KEY) or in "
                    ".pyiceberg.yaml, and give the catalog's name here: catalog: {name: NAME}.",
                    field="output.catalog",
                )
        return catalog


class RunSettings(_Section):
    """How a run is cut up and launched."""

    work_dir: str = Field("runs", description="Folder of run folders; all workers must see it")
    launcher: Literal["local", "spark"] = Field(
        "local", description="Who runs the shards: processes of this machine, or Spark executors"
    )
    shard_users: Positive = Field(5000, description="Users per shard, about")
    workers: Annotated[int, Field(ge=0, strict=True)] | Literal["auto"] = Field(
        "auto",
        description="Worker processes of the local launcher; auto: one per GPU, else one; 0: in "
        "this process",
    )
    max_attempts: Positive = Field(3, description="Tries of a shard whose worker dies")
    shard_timeout_s: Annotated[float, Field(gt=0)] = Field(
        3600.0, description="A worker that reports nothing for this long is ended"
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = Field(
        1800.0, description="A worker whose engine takes longer to start is ended"
    )
    metrics_dir: str | None = Field(
        None, description="Folder for a Prometheus textfile per surface, besides the run folder's"
    )
    price_per_hour: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Price of one device for an hour; for the cost in the summary"
    )


class SparkSettings(_Section):
    """How a run uses Spark, beside Spark's own configuration. See docs/spark.md."""

    prepare: Literal["driver", "executors"] = Field(
        "driver", description="Who writes the shards: the driver alone, or a Spark job"
    )
    resource: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")] = Field(
        "gpu", description="Name of the resource that holds GPU addresses"
    )
    profile: Literal["none", "task", "executor"] = Field(
        "none",
        description="ResourceProfile of the scoring stage. task: its tasks ask for the GPUs; "
        "executor: executors of their own, with dynamic allocation",
    )
    discovery_script: str | None = Field(
        None, description="GPU discovery script of executors that profile: executor asks for"
    )
    register_table: str | None = Field(
        None, description="Table of Spark's catalog that a publish adds its partition to"
    )

    @model_validator(mode="after")
    def _script(self) -> SparkSettings:
        if self.discovery_script is not None and self.profile != "executor":
            raise ValueError(
                "spark.discovery_script is for spark.profile: executor; elsewhere it is set by "
                "spark.executor.resource.gpu.discoveryScript"
            )
        return self


class AuditSettings(_Section):
    """Gates between scoring and publishing. Conservation, duplicates, catalog validity, excluded
    items and scores are always checked and always refuse; the others have limits, and those that
    `warn` names do not refuse."""

    min_coverage: Share = Field(0.0, description="Least share of users that got a result")
    max_quarantine_rate: Share = Field(0.5, description="Largest share of users quarantined")
    min_rows: Positive | None = Field(None, description="Fewest items of any list")
    min_rows_p5: Positive | None = Field(
        None, description="Fewest items of the list at the 5th percentile"
    )
    min_exact_share: Share | None = Field(None, description="Least share of lists proven exact")
    min_legal_mass: Share | None = Field(
        None, description="Least mean probability of the first token staying in the catalog"
    )
    max_score_drift: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="Largest PSI of the scores against the run published before; 0.25 is large",
    )
    min_overlap: Share | None = Field(
        None, description="Least mean share of items that lists have in common with those before"
    )
    max_row_change: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Largest change of the number of rows: 0.1 is a tenth more or less"
    )
    warn: tuple[LimitedGate, ...] = Field((), description="Gates that only warn")


class ReportSettings(_Section):
    """The page that every run leaves in its folder."""

    examples: Annotated[int, Field(ge=0, le=2000, strict=True)] = Field(
        200, description="Users on the page, the same ones every night; 0: none, and no ids"
    )
    title_column: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Catalog column that names items to people; default: title, else text"
    )


def _fits_a_name(surface: str) -> str:
    if len(quote(surface, safe="")) > _LONGEST_NAME:
        raise ValueError(f"too long for a folder's name: at most {_LONGEST_NAME} bytes, escaped")
    return surface


def _known_ds(value: str | None) -> str | None:
    if value is not None:
        if not _DS.match(value):
            raise ValueError("must be a date like 2026-11-28")
        dt.date.fromisoformat(value)
    return value


class RunConfig(_Section):
    """The whole file."""

    surface: Annotated[str, Field(min_length=1), AfterValidator(_fits_a_name)] = Field(
        description="Where the items are shown"
    )
    ds: Annotated[str | None, AfterValidator(_known_ds)] = Field(
        None, description="Partition date, YYYY-MM-DD; --ds wins"
    )
    engine: EngineSettings = EngineSettings()  # type: ignore[call-arg]
    sid: SidSettings | None = Field(None, description="Items are named by semantic IDs")
    text: TextSettings | None = Field(None, description="Items are named by their text")
    prompt: PromptSettings
    inputs: InputSettings
    task: TaskSettings
    output: OutputSettings
    run: RunSettings = RunSettings()  # type: ignore[call-arg]
    spark: SparkSettings = SparkSettings()  # type: ignore[call-arg]
    audit: AuditSettings = AuditSettings()  # type: ignore[call-arg]
    report: ReportSettings = ReportSettings()  # type: ignore[call-arg]

    @property
    def space(self) -> SidSpace:
        """The SID space; `ConfigError` where items are named by text."""
        if self.sid is None:
            raise ConfigError("this needs semantic IDs", expected="a sid section", got="none")
        return self.sid.space

    @property
    def needs_items(self) -> bool:
        """Whether the run reads a catalog. Only embeddings of prompts without history do not."""
        return self.task.embed is None or self.prompt.parsed.uses("history")

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
        yield from self._check_task()
        template = self.prompt.parsed
        runs_a_model = self.engine.backend in ("torch", "trtllm")
        if runs_a_model and self.engine.model is None:
            yield ConfigError(
                f"engine.model is missing for backend {self.engine.backend!r}",
                expected="a checkpoint folder",
                field="engine.model",
            )
        if self.engine.tensor_parallel > 1 and self.engine.backend == "torch":
            yield ConfigError(
                "engine.tensor_parallel is for TensorRT-LLM",
                expected="1 with engine.backend: torch, which has a worker per GPU",
                got=str(self.engine.tensor_parallel),
                field="engine.tensor_parallel",
            )
        needs_projector = template.uses("user_vector") and runs_a_model
        if needs_projector and self.engine.projector is None:
            yield ConfigError(
                "prompt.template has {user_vector} but engine.projector is unset",
                field="engine.projector",
            )

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
        for name, path in paths.items():
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

    def _check_task(self) -> Iterator[ConfigError]:
        """Settings that exclude each other."""
        task = self.task
        if self.inputs.self_contained and self.inputs.exclusions is not None:
            yield ConfigError(
                "inputs.exclusions is not read with inputs.self_contained",
                expected="each user's exclusions in the users column excluded_item_ids",
                field="inputs.exclusions",
            )
        own = self.inputs.self_contained  # the users table may hold the candidates
        if task.uses_candidates and self.inputs.candidates is None and not own:
            name = "score" if task.score is not None else "label"
            yield ConfigError(
                f"task.{name} needs inputs.candidates", got="none", field="inputs.candidates"
            )
        if task.embed is not None and self.output.layout != "long":
            yield ConfigError(
                "embeddings have no wide layout",
                expected="output.layout: long",
                got="wide",
                field="output.layout",
            )
        yield from self._check_limits()
        if task.embed is not None:
            yield from self._refuse("has no meaning for embed", self._item_settings())
            return
        if self.sid is None:
            settings = self._item_settings()
            del settings["task.k_column"], settings["task.eligibility"]
            settings["task.generate"] = task.generate is not None
            yield from self._refuse("needs semantic IDs, a sid section", settings)
            return
        levels = len(self.sid.sizes)
        if task.quota is not None and task.quota.level > levels:
            yield ConfigError(
                "task.quota.level is deeper than the semantic IDs",
                expected=f"at most {levels}",
                got=str(task.quota.level),
                field="task.quota.level",
            )
        if task.generate is not None:
            try:
                task.generate.widths(levels)
            except ConfigError as err:
                yield err
            yield from self._check_native(task.generate)
        if task.score is not None and task.score.length_norm != "sum":
            yield ConfigError(
                "task.score.length_norm: mean is for items named by text",
                expected="sum, so that a semantic ID scores the same scored and generated",
                got="mean",
                field="task.score.length_norm",
            )

    def _check_native(self, generate: GenerateSettings) -> Iterator[ConfigError]:
        """Native beams need an engine that has them, and say less than constrained ones."""
        if generate.mode != "native":
            return
        if self.engine.backend in ("fake", "torch"):
            yield ConfigError(
                "task.generate.mode: native needs an engine with beams of its own",
                expected="engine.backend: trtllm",
                got=self.engine.backend,
                field="task.generate.mode",
            )
        if self.task.score_norm != "full_vocab" and not generate.rescore:
            yield ConfigError(
                "native beams have scores over the whole vocabulary",
                expected="task.score_norm: full_vocab, or task.generate.rescore: true",
                got=f"task.score_norm: {self.task.score_norm}",
                field="task.generate.rescore",
            )
        if self.audit.min_legal_mass is not None:
            yield ConfigError(
                "audit.min_legal_mass needs constrained beams",
                expected="task.generate.mode: constrained or auto",
                got="native",
                field="audit.min_legal_mass",
            )

    def _check_limits(self) -> Iterator[ConfigError]:
        """A limit of the audit that nothing would be held against is refused, not ignored."""
        task, audit = self.task, self.audit
        lists = ("min_rows", "min_rows_p5", "max_score_drift", "min_overlap", "max_row_change")
        if task.embed is not None:
            limits = {f"audit.{n}": getattr(audit, n) is not None for n in lists}
            yield from self._refuse("is about lists, and embed writes none", limits)
        if task.generate is None:
            limits = {
                "audit.min_exact_share": audit.min_exact_share is not None,
                "audit.min_legal_mass": audit.min_legal_mass is not None,
            }
            yield from self._refuse("needs task.generate", limits)
        if task.score_norm != "full_vocab":
            limits = {"audit.min_legal_mass": audit.min_legal_mass is not None}
            yield from self._refuse("needs task.score_norm: full_vocab", limits)

    def _item_settings(self) -> dict[str, bool]:
        """Settings about items and lists, and whether they differ from their defaults."""
        task = self.task
        return {
            "task.quota": task.quota is not None,
            "task.collisions": task.collisions != "all",
            "task.score_norm": task.score_norm != "full_vocab",
            "task.k_column": task.k_column is not None,
            "task.eligibility": task.eligibility is not None,
        }

    @staticmethod
    def _refuse(why: str, settings: dict[str, bool]) -> Iterator[ConfigError]:
        for name, is_set in settings.items():
            if is_set:
                yield ConfigError(f"{name} {why}", expected="no such setting", field=name)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a run configuration."""
    return RunConfig.model_json_schema()

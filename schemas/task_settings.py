"""The `task` section: what is computed for each user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from schemas.eligibility import Expression, parse_eligibility
from schemas.errors import ConfigError, quoted
from schemas.section import LONGEST_LIST, Count, Flag, Name, Positive, Section, naming

if TYPE_CHECKING:
    from schemas.settings import RunConfig

ScoreNorm = Literal["full_vocab", "sid_range", "level", "trie"]
CollisionPolicy = Literal["all", "most_popular", "first"]
LengthNorm = Literal["sum", "mean"]
Pooling = Literal["last", "mean"]
Width = Annotated[Positive, Field(le=LONGEST_LIST)]
TokenId = Annotated[StrictInt, Field(le=2**31 - 1)]  # the plan says which are tokens


class ScoreSettings(Section):
    """Score the candidate sets of the candidates table."""

    all: Flag = Field(
        False, description="Score every candidate; false: only those that can reach the list"
    )
    length_norm: LengthNorm = Field(
        "sum",
        description="Log-probabilities of an item's tokens: sum, or mean (items named by text)",
    )


class LabelSettings(Section):
    """Ask the model about each candidate: the probability of labels behind the item's tokens."""

    labels: tuple[StrictStr | TokenId, ...] = Field(
        min_length=1,
        max_length=10_000,
        description="One token each, as text or id; the first one's score ranks",
    )
    labels_column: Name | None = Field(
        None, description="Users column with this user's own labels; null there means labels"
    )
    softmax: Flag = Field(
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


class EmbedSettings(Section):
    """Write the model's hidden state of each user's prompt: an embedding, no recommendations."""

    pooling: Pooling = Field("last", description="last: the prompt's last token; mean: all of them")
    normalize: Flag = Field(False, description="Scale each embedding to length 1")


class GenerateSettings(Section):
    """Search of the catalog."""

    search: Literal["auto", "best_first", "beam"] = Field(
        "auto",
        description="best_first: exact lists; beam: `width` prefixes per level; auto: best first, "
        "and as a beam for users whose model is flat",
    )
    width: Width | tuple[Width, ...] = Field(
        64, description="Beams kept per level: one number, or one per level"
    )
    max_positions: Annotated[Positive, Field(le=1_000_000)] | None = Field(
        None,
        description="Prefixes that a best-first search forwards for one user before it ends as a "
        "beam; by default four times what the beam forwards, or what a trained model needs",
    )
    exact: Flag = Field(
        False, description="No default for max_positions; beams widen users who are not certified"
    )
    max_width: Width = Field(4096, description="Widest beam that exact may use")
    mode: Literal["constrained", "native", "auto"] = Field(
        "constrained", description="native: the engine's own open-vocabulary beams, then filtered"
    )
    rescore: Flag = Field(False, description="Score again what native beams found")
    compare_users: Annotated[Count, Field(le=1_000_000)] = Field(
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


class QuotaSettings(Section):
    """Diversity: at most so many items of a list share the first `level` codes."""

    level: Annotated[Positive, Field(le=2)] = Field(1, description="Codes that make items alike")
    max_items: Width = Field(description="Most items of one list that share them")


class TaskSettings(Section):
    """What to compute for each user: `score`, `generate` or both; or `label`; or `embed`."""

    k: Width = Field(20, description="Recommendations per user")
    k_column: Name | None = Field(
        None, description="Users column with this user's k, 1 to task.k; null there means task.k"
    )
    score_norm: ScoreNorm = Field("full_vocab", description="What p is a softmax over")
    collisions: CollisionPolicy = Field("all", description="Items kept of those that share one SID")
    quota: QuotaSettings | None = Field(None, description="Most items alike in one list")
    eligibility: str | None = Field(
        None, description="Items a user may get, by catalog attributes; see schemas/eligibility.py"
    )
    exclude_history: Flag = Field(
        False, description="Never recommend an item of the user's own history column"
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
    def gives_lists(self) -> bool:
        """Whether users get lists of items; else embeddings."""
        return self.embed is None

    @property
    def searches_catalog(self) -> bool:
        """Whether any item of the catalog may be recommended, not candidates alone."""
        return self.generate is not None

    @property
    def asks_native_beams(self) -> bool:
        """Whether the engine's own beams are asked for."""
        return self.generate is not None and self.generate.mode == "native"

    @property
    def labels_column(self) -> str | None:
        """Users column with labels of their own."""
        return None if self.label is None else self.label.labels_column

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the tasks that are asked for."""
        names = ("score", "generate", "label", "embed")
        return tuple(name for name in names if getattr(self, name) is not None)

    @property
    def eligible(self) -> Expression | None:
        """The eligibility expression."""
        with naming("task.eligibility"):
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

    def conflicts(self, config: RunConfig) -> Iterator[ConfigError]:
        """Settings of the run that exclude each other."""
        if config.inputs.self_contained and config.inputs.exclusions is not None:
            yield ConfigError(
                "inputs.exclusions is not read with inputs.self_contained",
                expected="each user's exclusions in the users column excluded_item_ids",
                field="inputs.exclusions",
            )
        own = config.inputs.self_contained  # the users table may hold the candidates
        if self.uses_candidates and config.inputs.candidates is None and not own:
            name = "score" if self.score is not None else "label"
            yield ConfigError(
                f"task.{name} needs inputs.candidates", got="none", field="inputs.candidates"
            )
        if self.embed is not None and config.output.layout != "long":
            yield ConfigError(
                "embeddings have no wide layout",
                expected="output.layout: long",
                got="wide",
                field="output.layout",
            )
        yield from self._check_limits(config)
        if self.embed is not None:
            yield from self._refuse("has no meaning for embed", self._item_settings())
            return
        if config.sid is None:
            settings = self._item_settings()
            for name in ("k_column", "eligibility", "exclude_history"):
                del settings[f"task.{name}"]
            settings["task.generate"] = self.generate is not None
            yield from self._refuse("needs semantic IDs, a sid section", settings)
            return
        levels = len(config.sid.sizes)
        if self.quota is not None and self.quota.level > levels:
            yield ConfigError(
                "task.quota.level is deeper than the semantic IDs",
                expected=f"at most {levels}",
                got=str(self.quota.level),
                field="task.quota.level",
            )
        if self.generate is not None:
            try:
                self.generate.widths(levels)
            except ConfigError as err:
                yield err
            yield from self._check_native(self.generate, config)
        if self.score is not None and self.score.length_norm != "sum":
            yield ConfigError(
                "task.score.length_norm: mean is for items named by text",
                expected="sum, so that a semantic ID scores the same scored and generated",
                got="mean",
                field="task.score.length_norm",
            )

    def _check_native(self, generate: GenerateSettings, config: RunConfig) -> Iterator[ConfigError]:
        """Native beams need an engine that has them, and say less than constrained ones."""
        if generate.mode == "constrained":
            return
        if config.audit.min_legal_mass is not None:
            yield ConfigError(
                "audit.min_legal_mass needs constrained beams",
                expected="task.generate.mode: constrained",
                got=generate.mode,
                field="audit.min_legal_mass",
            )
        if generate.mode == "auto":
            return
        if self.score_norm != "full_vocab" and not generate.rescore:
            yield ConfigError(
                "native beams have scores over the whole vocabulary",
                expected="task.score_norm: full_vocab, or task.generate.rescore: true",
                got=f"task.score_norm: {self.score_norm}",
                field="task.generate.rescore",
            )

    def _check_limits(self, config: RunConfig) -> Iterator[ConfigError]:
        """A limit of the audit that nothing would be held against is refused, not ignored."""
        audit = config.audit
        lists = ("min_rows", "min_rows_p5", "max_score_drift", "min_overlap", "max_row_change",
                 "min_distinct_lists", "max_history_rows")  # fmt: skip
        if self.embed is not None:
            limits = {f"audit.{n}": getattr(audit, n) is not None for n in lists}
            yield from self._refuse("is about lists, and embed writes none", limits)
        if not config.reads_history:
            limits = {"audit.max_history_rows": audit.max_history_rows is not None}
            yield from self._refuse("needs {history} or task.exclude_history", limits)
        if self.generate is None:
            limits = {
                "audit.min_exact_share": audit.min_exact_share is not None,
                "audit.min_legal_mass": audit.min_legal_mass is not None,
            }
            yield from self._refuse("needs task.generate", limits)
        if self.score_norm != "full_vocab":
            limits = {"audit.min_legal_mass": audit.min_legal_mass is not None}
            yield from self._refuse("needs task.score_norm: full_vocab", limits)

    def _item_settings(self) -> dict[str, bool]:
        """Settings about items and lists, and whether they differ from their defaults."""
        return {
            "task.quota": self.quota is not None,
            "task.collisions": self.collisions != "all",
            "task.score_norm": self.score_norm != "full_vocab",
            "task.k_column": self.k_column is not None,
            "task.eligibility": self.eligibility is not None,
            "task.exclude_history": self.exclude_history,
        }

    @staticmethod
    def _refuse(why: str, settings: dict[str, bool]) -> Iterator[ConfigError]:
        for name, is_set in settings.items():
            if is_set:
                yield ConfigError(f"{name} {why}", expected="no such setting", field=name)

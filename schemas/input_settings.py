"""What a run reads: the sections `sid`, `text`, `prompt` and `inputs`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    model_validator,
)

from schemas.errors import ConfigError
from schemas.input_tables import TABLE, Fill, Input, place_of, placed
from schemas.section import Flag, Name, Positive, Section, naming
from schemas.semantic_ids import SidSpace
from schemas.templates import PromptTemplate, parse_template

TABLES = ("users", "catalog", "candidates", "exclusions")


Codes = Annotated[Positive, Field(le=4_194_304)]
Tokens = Annotated[Positive, Field(le=10_000_000)]
_MOST_CODES = 8_388_608  # of all levels: each is a token, held in memory with its text


class SidSettings(Section):
    """The SID space. `tokens[l]` is the text of level l's tokens with `{code}` for the number."""

    sizes: tuple[Codes, ...] = Field(min_length=1, max_length=16, description="Codes of each level")
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
        with naming("sid.tokens"):
            return SidSpace(self.sizes, self.tokens, self.end_token)

    @model_validator(mode="after")
    def _end(self) -> SidSettings:
        if self.end_after == "every" and self.end_token is None:
            raise ValueError("sid.end_after: every needs sid.end_token")
        if sum(self.sizes) > _MOST_CODES:
            raise ConfigError(
                "sid.sizes has too many codes",
                expected=f"at most {_MOST_CODES:,} of all levels together",
                got=f"{sum(self.sizes):,}",
                field="sid.sizes",
            )
        return self


class TextSettings(Section):
    """Items that have no semantic ID: a text of the catalog names them to the model."""

    column: Name = Field("text", description="Catalog column with the text")
    max_tokens: Annotated[Positive, Field(le=1_000_000)] = Field(
        64, description="Longest text; a longer one is an error, not cut"
    )


class PromptSettings(Section):
    """The prompt of one user; see schemas/templates.py for the slots."""

    template: str = Field(description="Text with slots; see schemas/templates.py")
    max_tokens: Tokens = Field(1024, description="Longest prompt; the oldest history goes first")
    history_max_items: Annotated[Positive, Field(le=1_000_000)] = Field(
        50, description="Latest items kept in {history}"
    )
    history_separator: str = Field("", description="Text between two items of {history}")
    null_text: str | None = Field(
        None, description="Written for a null text or scalar; when unset the row is quarantined"
    )

    @property
    def parsed(self) -> PromptTemplate:
        """The template's segments."""
        with naming("prompt.template"):
            return parse_template(self.template)


class InputSettings(Section):
    """Where the tables are: a Parquet file, a folder of them, or a glob; `{delta: PATH}` or
    `{iceberg: NAME or PATH}`; with Spark also `{table: db.users}`, a table of its catalog."""

    users: Input = Field(description="user_id and what the template names")
    catalog: Input | None = Field(
        None,
        description="item_id, sid; optional popularity, title, text; only embed can do without",
    )
    candidates: Input | None = Field(
        None, description="Items to score, for task.score and task.label"
    )
    exclusions: Input | None = Field(None, description="user_id, item_id: never recommended")
    self_contained: Flag = Field(
        False,
        description="The users table's files are the shards, with item_ids (candidates) and "
        "excluded_item_ids in columns; nothing is joined",
    )

    @property
    def paths(self) -> dict[str, str | None]:
        """Where each table is, in a text."""
        return {name: place_of(getattr(self, name)) for name in TABLES}

    def placed(self, fill: Fill) -> InputSettings:
        """With every path filled in; see `schemas.input_tables.placed`."""
        return self.model_copy(update={name: placed(getattr(self, name), fill) for name in TABLES})

    @property
    def tables(self) -> dict[str, str]:
        """Inputs that are tables of Spark's catalog, by their names there."""
        named = {name: at for name, at in self.paths.items() if at and at.startswith(TABLE)}
        return {name: value.removeprefix(TABLE) for name, value in named.items()}

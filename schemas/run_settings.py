"""How a run is launched, held against limits and published: the sections `output`, `run`, `spark`,
`audit` and `report`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from schemas.errors import ConfigError, quoted
from schemas.section import (
    LONGEST_LIST,
    Count,
    Flag,
    Name,
    Number,
    Positive,
    Seconds,
    Section,
    Share,
    Written,
)

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
    "unknown_history",
    "history_rows",
    "distinct_lists",
]
KeptDays = Annotated[Number, Field(ge=0, le=100_000)]
Rows = Annotated[Positive, Field(le=LONGEST_LIST)]
_SECRET_KEY = re.compile(
    r"secret|passw|token|credential|(access|private|account)[-_.]?key|signature|connection.string",
    re.I,
)
_SECRET_VALUE = re.compile(r"://[^/@\s]+@")  # user:password@ in a URL


class OutputSettings(Section):
    """Where recommendations are published."""

    path: Written = Field(description="Root of the table; partitions ds=…/surface=… below it")
    format: Literal["parquet", "iceberg", "delta"] = Field("parquet", description="Table format")
    layout: Literal["long", "wide"] = Field(
        "long", description="long: a row per recommendation; wide: a row per user"
    )
    table: Name | None = Field(
        None, description="Iceberg: namespace.table; default nightshelf.recommendations"
    )
    quarantine: Written | None = Field(
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


class RunSettings(Section):
    """How a run is cut up and launched."""

    work_dir: Written = Field("runs", description="Folder of run folders; all workers must see it")
    launcher: str = Field(
        "local",
        description="Who runs the shards: `local`, processes of this machine; `spark`, executors; "
        "or another name of jobs/launchers.py",
    )
    shard_users: Annotated[Positive, Field(le=100_000_000)] = Field(
        5000, description="Users per shard, about"
    )
    workers: Annotated[Count, Field(le=1024)] | Literal["auto"] = Field(
        "auto",
        description="Worker processes of the local launcher; auto: one per GPU, else one; 0: in "
        "this process",
    )
    max_attempts: Annotated[Positive, Field(le=1000)] = Field(
        3, description="Tries of a shard whose worker dies"
    )
    shard_timeout_s: Seconds = Field(
        3600.0, description="A worker that reports nothing for this long is ended"
    )
    start_timeout_s: Seconds = Field(
        1800.0, description="A worker whose engine takes longer to start is ended"
    )
    keep_days: KeptDays = Field(
        7.0, description="gc: days that shards, catalogs and attempts of idle runs stay"
    )
    metrics_dir: Written | None = Field(
        None, description="Folder for a Prometheus textfile per surface, besides the run folder's"
    )
    price_per_hour: Number | None = Field(
        None, description="Price of one device for an hour; for the cost in the summary"
    )


class SparkSettings(Section):
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
    discovery_script: Name | None = Field(
        None, description="GPU discovery script of executors that profile: executor asks for"
    )
    register_table: Name | None = Field(
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


class AuditSettings(Section):
    """Gates between scoring and publishing. Conservation, duplicates, catalog validity, excluded
    items and scores are always checked and always refuse; the others have limits, and those that
    `warn` names do not refuse."""

    allow_empty: Flag = Field(
        False, description="Whether a run without a single row may be published, and empty a table"
    )
    min_coverage: Share = Field(0.0, description="Least share of users that got a result")
    max_quarantine_rate: Share = Field(0.5, description="Largest share of users quarantined")
    max_unknown_history: Share = Field(
        0.5,
        description="Share of history items that the catalog does not have, from which a run is "
        "refused; 1: never",
    )
    max_history_rows: Share | None = Field(
        None, description="Largest share of rows whose item is in the user's own history"
    )
    min_distinct_lists: Share | None = Field(
        None, description="Least share of lists that no other user has as well, in a sample"
    )
    min_rows: Rows | None = Field(None, description="Fewest items of any list")
    min_rows_p5: Rows | None = Field(
        None, description="Fewest items of the list at the 5th percentile"
    )
    min_exact_share: Share | None = Field(None, description="Least share of lists proven exact")
    min_legal_mass: Share | None = Field(
        None, description="Least mean probability of the first token staying in the catalog"
    )
    max_score_drift: Number | None = Field(
        None,
        description="Largest PSI of the scores against the run published before; 0.25 is large",
    )
    min_overlap: Share | None = Field(
        None, description="Least mean share of items that lists have in common with those before"
    )
    max_row_change: Number | None = Field(
        None, description="Largest change of the number of rows: 0.1 is a tenth more or less"
    )
    warn: tuple[LimitedGate, ...] = Field((), description="Gates that only warn")


class ReportSettings(Section):
    """The page that every run leaves in its folder."""

    examples: Annotated[Count, Field(le=2000)] = Field(
        200, description="Users on the page, the same ones every night; 0: none, and no ids"
    )
    title_column: Name | None = Field(
        None, description="Catalog column that names items to people; default: title, else text"
    )

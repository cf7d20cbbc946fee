"""The columns that a run may read of a table."""

from __future__ import annotations

from schemas.eligibility import attributes, user_columns
from schemas.settings import RunConfig
from schemas.tables import USER_CANDIDATES, USER_EXCLUSIONS


def columns_of(config: RunConfig, name: str) -> set[str]:
    """Columns of an input that a run may read; others need not be copied."""
    rule = config.task.eligible
    if name == "users":
        columns = {"user_id", "embedding", "history", "user_sid", "segment"}
        columns |= {USER_CANDIDATES, USER_EXCLUSIONS} if config.inputs.self_contained else set()
        columns |= set(config.prompt.parsed.columns) | set(user_columns(rule) if rule else ())
        columns |= {config.task.k_column} if config.task.k_column else set()
        labels = config.task.labels_column
        return columns | ({labels} if labels else set())
    if name == "catalog":
        columns = {"item_id", "pid", "sid", "popularity", "title", "text"}
        columns |= {config.text.column} if config.text else set()
        columns |= {config.report.title_column} if config.report.title_column else set()
        return columns | set(attributes(rule) if rule else ())
    return {"user_id", "item_id", "item_ids", "segment"}

"""The catalog's items and their semantic IDs: the rules of `nightshelf catalog check`."""

from __future__ import annotations

import pyarrow as pa

from pipelines.catalog.check import Problem as CatalogProblem
from pipelines.catalog.check import check_rows
from pipelines.catalog.items import catalog_path
from pipelines.preflight.findings import Findings, Problem
from pipelines.preflight.tables import TableSeen
from schemas.settings import RunConfig

_NEEDED = {"*", "item_id", "sid"}
_REMEDIES = {
    "null_item_id": "Give every item an id, or take the rows out.",
    "duplicate_item_id": "Keep one row per item_id.",
    "null_sid": "Give every item a semantic ID, or take the rows out.",
    "empty_sid": "Give every item a semantic ID, or take the rows out.",
    "null_code": "Write shorter semantic IDs as shorter lists, without nulls.",
    "too_many_levels": "Add the levels to sid.sizes and sid.tokens, or cut the semantic IDs.",
    "code_out_of_range": "Raise sid.sizes to the codebooks the model was trained with, or correct "
    "the codes (the first of a level is 0).",
    "unreadable_sid": "Write the tokens as sid.tokens says, or correct sid.tokens.",
    "unknown_token": "Write the tokens as sid.tokens says, or correct sid.tokens and sid.sizes.",
    "token_of_another_level": "Write the tokens of a semantic ID in the order of the levels.",
    "prefix_conflict": "Give the items other semantic IDs, or set sid.end_token if the model was "
    "trained with one.",
    "empty": "Write the items, or point inputs.catalog at where they are.",
}


def check_items(config: RunConfig, seen: TableSeen, findings: Findings) -> pa.Array | None:
    """Look every item over; returns the item ids, None where the catalog cannot be read."""
    if _NEEDED & seen.bad_columns:
        return None  # said already
    if config.text is not None and config.text.column in seen.bad_columns:
        return None
    problems, facts, ids = check_rows(config)
    path = catalog_path(config)
    for problem in problems:
        findings.add(_as_problem(problem, path, config))
    items = len(ids) if facts is None and ids is not None else facts.items if facts else 0
    if items and config.task.gives_lists and config.task.k > items:
        findings.warn(
            Problem(
                kind="config",
                file=path,
                field="task.k",
                message="lists cannot be as long as task.k: the catalog has fewer items",
                expected=f"at most {items}",
                got=str(config.task.k),
                remedy=f"Set task.k to at most {items}, or look whether inputs.catalog is the "
                "whole catalog.",
            )
        )
    return ids


def _as_problem(problem: CatalogProblem, path: str, config: RunConfig) -> Problem:
    column = "item_id" if problem.rule.endswith("item_id") else "sid"
    if config.sid is None:
        column = config.text.column if config.text is not None else "text"
    return Problem(
        kind="input",
        file=path,
        field=column,
        message=f"{problem.message} ({problem.count:,})",
        got="; ".join(problem.examples) or None,
        remedy=_REMEDIES.get(problem.rule, "Correct the items, or take the rows out."),
    )

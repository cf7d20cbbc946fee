"""Rows that would be set aside, and ids that join nothing, told from the first rows of some files.

Warnings only: a run quarantines such rows and goes on. Users pass the very rules of a run
(`pipelines.inputs.row_rules`). Memory is bounded by the sample, whatever the tables hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.row_rules import UserCheck
from pipelines.inputs.shard_columns import first_users
from pipelines.inputs.users_once import check_users_once
from pipelines.preflight.findings import Findings, Problem
from pipelines.preflight.prompts import check_prompts
from pipelines.preflight.table_hints import warn_of_days, warn_of_ready_prompts
from pipelines.preflight.tables import TableSeen, TablesSeen
from pipelines.sources.input_columns import Piece, Wanted, read_columns, scan_columns
from schemas.column_types import is_empty, is_list
from schemas.errors import ConfigError, InputError, TableError
from schemas.runs import RunPlan
from schemas.settings import RunConfig
from schemas.tables import ID_TYPES, IdType, id_type

_FILES = 4
_ROWS = 10_000  # over all files
_LISTS = 2_000  # rows with lists of candidates, which may be long
_BYTES = 64 << 20  # of vectors
_IDS = 2_000  # users whose candidates are looked for
_MOST_CANDIDATES = 5_000_000  # rows read to find them
_MANY_UNKNOWN = 0.05  # of a history; a few items go out of the catalog every day


def check_samples(
    config: RunConfig, seen: TablesSeen, item_ids: pa.Array | None, findings: Findings
) -> None:
    """Look at rows of the tables that are right as tables."""
    tables = seen.tables
    for one in tables.values():
        warn_of_days(one, findings)
    users = tables.get("users")
    if users is not None and users.usable and users.table.rows:
        table: pa.Table | None = None
        with _reading(users, findings):
            table = _check_users(config, seen, users, item_ids, findings)
            if config.inputs.self_contained:
                check_users_once(users.table)
        candidates = tables.get("candidates")
        if table is not None and candidates is not None:
            with _reading(candidates, findings):
                _check_candidates_of(config, seen, table, findings)
    for name in ("candidates", "exclusions"):
        table_seen = tables.get(name)
        if table_seen is not None and table_seen.usable and item_ids is not None:
            with _reading(table_seen, findings):
                _check_items_of(table_seen, item_ids, findings)


@contextmanager
def _reading(table: TableSeen, findings: Findings) -> Iterator[None]:
    """Rows that cannot be read are a problem of their file, unless a setting is to blame."""
    try:
        yield
    except ConfigError:
        if not findings.problems:
            raise
    except InputError as err:
        findings.add_error(err, field=f"inputs.{table.table.name}")
    except (OSError, pl.exceptions.PolarsError, pa.ArrowException) as err:
        findings.add_error(
            TableError(
                f"{table.table.name}: rows cannot be read",
                got=str(err).strip().partition("\n")[0][:200],
                where=table.table.files[0].path,
                do="Write the file again.",
                field=f"inputs.{table.table.name}",
            )
        )


def _spread(table: TableSeen) -> list[str]:
    """Some files of a table, spread over all of them; those without rows say nothing."""
    files = [file.path for file in table.table.files if file.rows]
    step = max(1, -(-len(files) // _FILES))
    return files[::step]


def _check_users(
    config: RunConfig,
    seen: TablesSeen,
    users: TableSeen,
    item_ids: pa.Array | None,
    findings: Findings,
) -> pa.Table:
    paths = _spread(users)
    rows = _ROWS // max(1, len(paths))
    if seen.vector_dim:
        rows = max(1, min(rows, _BYTES // (4 * seen.vector_dim * len(paths))))
    item = "string" if item_ids is None else id_type(item_ids.type)
    plan = _plan(config, seen, users, item)
    table = first_users(plan, paths, rows)
    check = UserCheck(table, plan)
    check.run()
    grouped = Counter((row.rule, row.message) for row in check.quarantined)
    first = {(row.rule, row.message): row for row in reversed(check.quarantined)}
    for (rule, message), count in grouped.items():
        example = first[rule, message]
        findings.warn(
            Problem(
                kind="input",
                file=example.file or paths[0],
                field=next(iter(example.payload), "") or _COLUMN_OF.get(rule, "inputs.users"),
                message=f"users would be set aside by rule {rule}: {message}",
                got=f"{count:,} of the {len(table):,} users looked at, first {example.key}",
                remedy="Correct these rows where they are written; until then the run puts them "
                "into the quarantine.",
            )
        )
    share = len(check.quarantined) / max(1, len(table))
    if share > config.audit.max_quarantine_rate:
        findings.warn(
            Problem(
                kind="input",
                file=config.inputs.paths["users"] or "",
                field="audit.max_quarantine_rate",
                message="the audit would refuse the run: too many users would be set aside",
                expected=f"at most {config.audit.max_quarantine_rate:.1%}",
                got=f"{share:.1%} of the {len(table):,} users looked at",
                remedy="Correct the rows above, or raise audit.max_quarantine_rate.",
            )
        )
    warn_of_ready_prompts(config, table.filter(pa.array(check.ok)), paths[0], findings)
    check_prompts(config, table.filter(pa.array(check.ok)), paths[0], findings)
    if item_ids is not None and "history" in table.column_names:
        flat = pc.list_flatten(table.column("history"))
        _warn_unknown(users, "history", flat, item_ids, findings, _MANY_UNKNOWN)
    return table


_COLUMN_OF = {
    "null_user_id": "user_id",
    "duplicate_user": "user_id",
    "null_vector": "embedding",
    "vector_length": "embedding",
    "vector_not_finite": "embedding",
    "user_sid_codes": "user_sid",
}


def _plan(config: RunConfig, seen: TablesSeen, users: TableSeen, item: IdType) -> RunPlan:
    """As much of a plan as the rules for users read."""
    return RunPlan.model_construct(  # unchecked: settings that do not fit together are said already
        run_id="",
        ds=config.ds or "",
        surface=config.surface,
        config=config,
        inputs={name: table.table for name, table in seen.tables.items() if table.usable},
        hashes={},
        num_shards=1,
        user_id_type=id_type(users.schema.field("user_id").type),
        item_id_type=item,
        vector_dim=seen.vector_dim,
        run_dir="",
    )


def _id(column: str, table: TableSeen) -> Wanted:
    return Wanted(column, column, ID_TYPES[id_type(table.schema.field(column).type)])


def _check_items_of(table: TableSeen, item_ids: pa.Array, findings: Findings) -> None:
    """Items of candidates and exclusions that the catalog does not have."""
    paths = _spread(table)
    column = "item_id" if "item_id" in table.schema.names else "item_ids"
    if column not in table.schema.names or not paths:
        return
    found, kind = table.schema.field(column).type, ID_TYPES[id_type(item_ids.type)]
    if is_empty(found) or id_type(found) != id_type(item_ids.type):
        return  # ids of two types are a problem of the tables
    rows = max(1, (_LISTS if column == "item_ids" else _ROWS) // len(paths))
    wanted = [Wanted(column, column, pa.list_(kind) if is_list(found) else kind)]
    if "user_id" in table.schema.names:  # read with them, as a run does
        wanted.append(_id("user_id", table))
    parts: list[pa.Array] = []
    with findings.collecting(field=column):
        for path in paths:
            values = read_columns(table.table.name, path, wanted, rows).column(column)
            parts += (pc.list_flatten(values) if is_list(found) else values).drop_null().chunks
    _warn_unknown(table, column, pa.chunked_array(parts, kind), item_ids, findings, 0.0)


def _warn_unknown(
    table: TableSeen,
    column: str,
    values: pa.Array | pa.ChunkedArray,
    item_ids: pa.Array,
    findings: Findings,
    allowed: float,
) -> None:
    if not len(values) or id_type(values.type) != id_type(item_ids.type):
        return  # ids of two types are a problem of the tables
    kind = ID_TYPES[id_type(item_ids.type)]
    values = values.cast(kind)
    known = pc.is_in(values, value_set=item_ids.cast(kind))
    unknown = len(values) - int(pc.sum(known).as_py() or 0)
    if unknown <= allowed * len(values):
        return
    first = values.filter(pc.invert(known))[0].as_py()
    findings.warn(
        Problem(
            kind="input",
            file=table.table.files[0].path,
            field=column,
            message=f"{table.table.name}: items that the catalog does not have",
            got=f"{unknown:,} of {len(values):,} looked at ({unknown / len(values):.1%}), "
            f"first {first!r}",
            remedy="Write the table and the catalog from the same items; what the catalog does "
            "not have is left out.",
        )
    )


def _check_candidates_of(
    config: RunConfig, seen: TablesSeen, users: pa.Table, findings: Findings
) -> None:
    """Users of the sample that no candidate set is for, where nothing else gives them items."""
    table = seen.tables.get("candidates")
    shape = seen.shape
    if (
        table is None
        or not table.usable
        or shape in (None, "shared")
        or config.task.searches_catalog
    ):
        return
    if table.table.rows > _MOST_CANDIDATES:
        return
    column = "segment" if shape == "segment" else "user_id"
    if column not in users.column_names:
        return
    asked = pl.Series(users.column(column).slice(0, _IDS).to_pylist(), strict=False)
    asked = asked.drop_nulls().unique().cast(pl.String)
    pieces = [Piece(file.path, 0) for file in table.table.files]
    scan = scan_columns("candidates", pieces, [Wanted(column, column, pa.string())])
    found = scan.filter(pl.col(column).is_in(asked.implode())).unique().collect(engine="streaming")
    missing = asked.filter(~asked.is_in(found.to_series().implode()))
    if not len(missing):
        return
    findings.warn(
        Problem(
            kind="input",
            file=table.table.files[0].path,
            field=column,
            message=f"no candidates for some {column}s of the users",
            got=f"{len(missing):,} of the {len(asked):,} looked at, first {missing.sort()[0]!r}",
            remedy="Write candidates for them; without any they get no recommendations.",
        )
    )

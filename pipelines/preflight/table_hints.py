"""What a table says of itself that a run would take literally, and its owner hardly means.

Warnings only.
"""

from __future__ import annotations

import re

import pyarrow as pa

from pipelines.preflight.findings import Findings, Problem
from pipelines.preflight.tables import TableSeen
from schemas.settings import RunConfig

_DAY = re.compile(r"/(?:ds|dt|date|day|partition_date)=(\d{4}-\d{2}-\d{2})/")
_CHAT = re.compile(r"<\|[a-z_]{2,24}\|>|\[/?INST\]|<(?:start|end)_of_turn>")
_TEXTS = 200  # rows looked at


def warn_of_days(table: TableSeen, findings: Findings) -> None:
    """A folder with a part for each day is read whole: every user once a day."""
    days = sorted({day for file in table.table.files for day in _DAY.findall(file.path)})
    if len(days) < 2:
        return
    name = table.table.name
    findings.warn(
        Problem(
            kind="config",
            file=findings.config_file,
            field=f"inputs.{name}",
            message=f"{name}: the folder has a part for each day, and all of them are read",
            expected="the part of one day, such as …/ds={ds}/",
            got=f"{len(days)} days, {days[0]} to {days[-1]}",
            remedy=f"Write {{ds}} into inputs.{name}, unless the days together are the table.",
        )
    )


def warn_of_ready_prompts(
    config: RunConfig, users: pa.Table, file: str, findings: Findings
) -> None:
    """Text that is itself a prompt: its semantic IDs and chat tokens are read as text, letter by
    letter, since a user's text can never name an item.
    """
    if config.sid is None:
        return
    patterns = [re.escape(p).replace(r"\{code\}", r"\d+") for p in config.sid.tokens]
    tokens = re.compile("|".join([*patterns, _CHAT.pattern]))
    for column in config.prompt.parsed.columns:
        texts = users.column(column).slice(0, _TEXTS).cast(pa.string()).drop_null().to_pylist()
        found = [match[0] for text in texts if (match := tokens.search(text))]
        if not found or 2 * len(found) < len(texts):
            continue
        findings.warn(
            Problem(
                kind="input",
                file=file,
                field=column,
                message="the column looks like prompts that are made already",
                expected="text of people, in which tokens of items and of chats mean nothing",
                got=f"{found[0]!r} in {len(found)} of the {len(texts)} rows looked at",
                remedy="Give the items as {history} or {user_sid}, and write the template's own "
                "tokens into prompt.template.",
            )
        )

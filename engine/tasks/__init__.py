"""What a run does for each user: one module per task, with everything that others ask about it.

`tasks_of` gives the tasks of a configuration. Several may share one prefill: candidates are scored,
and beams searched, behind the same prompts. `task.py` says what a task is.
"""

from __future__ import annotations

import pyarrow as pa

from engine.prompts.tokenizer import Tokenizer
from engine.tasks.embed import Embed
from engine.tasks.generate import Generate
from engine.tasks.label import Label
from engine.tasks.score import Score
from engine.tasks.task import Task
from schemas.settings import RunConfig

__all__ = ["TASKS", "Task", "columns_of", "suffix_tokens", "tasks_of"]

TASKS: tuple[type[Task], ...] = (Score, Generate, Label, Embed)


def tasks_of(config: RunConfig) -> list[Task]:
    """The tasks that a run asks for."""
    return [task(config) for task in TASKS if task.name in config.task.asked]


def columns_of(config: RunConfig) -> tuple[pa.Field, ...]:
    """Columns of the published rows that the tasks of a run add to those of all lists."""
    return tuple(column for task in tasks_of(config) for column in task.columns())


def suffix_tokens(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Tokens that the tasks of a run put behind an item."""
    return max((task.suffix_tokens(tokenizer) for task in tasks_of(config)), default=0)

"""Prompts that could not be built: too long without any history, or with nothing to predict from.

The run's own prompt builder makes the prompts of a sample. History is left out: it is cut to fit.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from engine.prompts.builder import PromptBuilder
from engine.prompts.projector_spec import read_projector_spec
from engine.prompts.tokenizer import bind_space, load_tokenizer
from pipelines.inputs.read_batches import texts_of
from pipelines.inputs.row_rules import ragged
from pipelines.preflight.findings import Findings, Problem
from schemas.errors import NightshelfError
from schemas.requests import Rejection, UserBatch
from schemas.settings import RunConfig

_HISTORY = re.compile(r"(?<!\{)\{history\}(?!\})")


def check_prompts(config: RunConfig, users: pa.Table, file: str, findings: Findings) -> None:
    """Warn of users whose prompt a run would set aside.

    Args:
        users: rows that pass every other rule, as a shard holds them.
    """
    try:
        rejections = _rejections(config, users)
    except NightshelfError:
        if findings.problems:
            return  # the tokenizer, the tokens or the projector cannot be read: that is said
        raise
    grouped = Counter(rejection.rule for rejection in rejections)
    for rule, count in grouped.items():
        example = next(rejection for rejection in rejections if rejection.rule == rule)
        user = users.column("user_id")[example.user].as_py()
        findings.warn(
            Problem(
                kind="input",
                file=file,
                field="prompt.max_tokens" if rule == "prompt_too_long" else "prompt.template",
                message=f"users would be set aside by rule {rule}: {example.message}",
                got=f"{count:,} of the {len(users):,} users looked at, first {user}",
                remedy="Shorten their texts or raise prompt.max_tokens."
                if rule == "prompt_too_long"
                else "Begin the template with text, or give the users a history.",
            )
        )


def _rejections(config: RunConfig, users: pa.Table) -> list[Rejection]:
    settings = config.prompt
    template = _HISTORY.sub("", settings.template)
    if not template:  # history and nothing else
        lengths = pc.fill_null(pc.list_value_length(users.column("history")), 0).to_numpy()
        message = "the prompt has no token to predict from"
        return [Rejection(int(u), "empty_prompt", message) for u in np.flatnonzero(lengths == 0)]
    settings = settings.model_copy(update={"template": template})
    parsed, tokenizer = settings.parsed, load_tokenizer(config)
    soft = 1
    if config.engine.projector is not None and parsed.uses("user_vector"):
        soft = read_projector_spec(config.engine.projector).num_tokens
    has_sids = parsed.uses("user_sid")
    space = bind_space(config, tokenizer) if has_sids else None
    batch = UserBatch(
        num_users=len(users),
        user_sids=ragged(users.column("user_sid").combine_chunks()) if has_sids else None,
        texts={c: texts_of(users.column(c), settings.null_text) for c in parsed.columns},
    )
    return PromptBuilder(settings, tokenizer, space, None, soft).build(batch).rejections

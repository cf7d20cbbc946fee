"""The model folder, its tokenizer, its vocabulary and the projector, as far as files tell."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from engine.backends.registry import spec_of
from engine.checkpoints.architecture import is_known, read_config
from engine.prompts.tokenizer import check_model, load_tokenizer, vocab_size
from engine.tasks import tasks_of
from pipelines.catalog.check import Problem as CatalogProblem
from pipelines.catalog.check import check_vocabulary
from pipelines.planning.engine_check import backend_problems, engine_problems, fit_prompt
from pipelines.preflight.findings import Findings, Problem
from schemas.config_problems import ConfigReport
from schemas.errors import EngineError
from schemas.settings import RunConfig

_VOCABULARY_REMEDIES = {
    "token_not_single": "Add the tokens to the tokenizer the model was trained with, or correct "
    "sid.tokens and sid.sizes.",
    "token_twice": "Give every code, and the end token, a token of its own.",
    "token_without_embedding": "Resize the model's embeddings to the tokenizer, save both again.",
    "vocabulary_mismatch": "Save model and config.json together, after resizing the embeddings.",
    "tokenizer_larger_than_model": "Resize the model's embeddings to the tokenizer "
    "(resize_token_embeddings) and save the checkpoint again; new rows must be trained.",
}


def check_engine(report: ConfigReport, config: RunConfig, findings: Findings) -> RunConfig:
    """Look at what `engine` names. Returns the configuration as a plan would complete it."""
    if report.is_repaired("engine.backend", "engine.model"):
        return config
    spec = None
    with findings.collecting(field="engine.backend"):
        for problem in backend_problems(config):
            findings.add_error(problem)
        spec = spec_of(config.engine.backend)
    if spec is None:
        return config
    if config.run.launcher == "local":  # the machines of another may have what this one lacks
        for missing in spec.missing_packages():
            findings.add_error(missing)
    if config.engine.model is None and spec.reads_checkpoint:
        return config  # said already: it is missing
    _check_vocabulary(config, findings)
    _check_labels(config, findings)
    tokenizer = None
    with suppress(EngineError):  # said already
        tokenizer = load_tokenizer(config.model_copy(update={"sid": None}))
    config = fit_prompt(config, tokenizer)
    for problem in engine_problems(config, tokenizer):
        if problem.field is None or not report.is_repaired(problem.field):
            findings.add_error(problem, field="engine.model")
    _warn_of_untried(config, findings)
    return config


def _warn_of_untried(config: RunConfig, findings: Findings) -> None:
    """A type of model that nobody has tried: the engine itself decides, when it starts."""
    folder = config.engine.model
    if folder is None or not spec_of(config.engine.backend).own_forward:
        return
    try:
        raw = read_config(folder)
    except EngineError:
        return  # said already
    if is_known(raw):
        return
    findings.warn(
        Problem(
            kind="input",
            file=folder,
            field="engine.model",
            message="a type of model that was not tried; the engine decides when it starts",
            got=f"model_type {raw.get('model_type')!r}",
            remedy="Run `nightshelf doctor --model` with it first: it loads the model and compares "
            "it with its library.",
        )
    )


def _check_vocabulary(config: RunConfig, findings: Findings) -> None:
    """Tokenizer, and the tokens of semantic IDs; all that is wrong with them."""
    model = config.engine.model or ""
    if config.sid is None:
        with findings.collecting(file=model, field="engine.model", remedy=_SAVE):
            load_tokenizer(config)
        return
    spec = spec_of(config.engine.backend)
    said = set()  # by `engine_problems`
    if spec.reads_checkpoint:
        said |= {"checkpoint", "tokenizer_larger_than_model"}
    if spec.own_forward:
        said.add("vocabulary_mismatch")
    problems, _ = check_vocabulary(config)
    for found in problems:
        if found.rule in said:
            continue
        findings.add(_of_catalog(found, model))


_SAVE = "Save model and tokenizer into one folder with save_pretrained(folder)."


def _of_catalog(found: CatalogProblem, model: str) -> Problem:
    about_sid = found.rule.startswith("token_")
    return Problem(
        kind="input",
        file=model,
        field="sid.tokens" if about_sid else "engine.model",
        message=found.message,
        got="; ".join(found.examples) or None,
        remedy=_VOCABULARY_REMEDIES.get(found.rule, _SAVE),
    )


def _check_labels(config: RunConfig, findings: Findings) -> None:
    """Labels that are not one token, and an adapter beside the weights."""
    without_sid = config.model_copy(update={"sid": None})  # SID tokens have been looked at
    try:
        tokenizer = load_tokenizer(without_sid)
    except EngineError:
        return  # said already
    known = None
    with suppress(EngineError):  # said already
        known = vocab_size(config)
    for task in tasks_of(config):
        if (problem := task.check(tokenizer, known)) is None:
            continue
        findings.add_error(
            problem,
            field="task.label.labels",
            remedy="Use words that the tokenizer has as one token, with the space before them if "
            "it needs one, or token ids.",
        )
    try:
        check_model(without_sid, tokenizer)
    except EngineError as err:
        if (Path(config.engine.model or "") / "adapter_config.json").exists():
            findings.add_error(err, field="engine.model")

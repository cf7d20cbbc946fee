"""The model folder, its tokenizer, its vocabulary and the projector, as far as files tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.checkpoint import lacking, safetensors_header
from engine.projector_spec import ProjectorSpec, read_projector_spec
from engine.registry import check_backend
from engine.tokenizer import check_model, load_tokenizer
from pipelines.catalog_check import Problem as CatalogProblem
from pipelines.catalog_check import check_vocabulary
from pipelines.preflight.findings import Findings, Problem
from schemas.config_problems import ConfigReport
from schemas.errors import ConfigError, EngineError, quoted
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


def check_engine(report: ConfigReport, config: RunConfig, findings: Findings) -> None:
    """Look at what `engine` names."""
    if report.is_repaired("engine.backend", "engine.model"):
        return
    with findings.collecting(field="engine.backend"):
        check_backend(config.engine.backend)
    if config.engine.model is not None:
        _check_folder(config.engine.model, findings)
    elif config.engine.backend in ("torch", "trtllm"):
        return  # said already: it is missing
    _check_vocabulary(config, findings)
    _check_labels(config, findings)
    if config.engine.projector is not None and not report.is_repaired("engine.projector"):
        _check_projector(config, config.engine.projector, findings)
    _check_positions(config, findings)


def _check_folder(folder: str, findings: Findings) -> None:
    """Files that only the device needs, and so nobody has looked for yet."""
    if not Path(folder).is_dir():
        return  # the tokenizer's check says it
    for problem in lacking(folder):
        findings.add_error(problem)


def _check_vocabulary(config: RunConfig, findings: Findings) -> None:
    """Tokenizer, and the tokens of semantic IDs; all that is wrong with them."""
    model = config.engine.model or ""
    if config.sid is None:
        with findings.collecting(file=model, field="engine.model", remedy=_SAVE):
            load_tokenizer(config)
        return
    problems, _ = check_vocabulary(config)
    for found in problems:
        if found.rule == "checkpoint" and not (Path(model) / "config.json").exists():
            continue  # said already
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
    try:
        check_model(without_sid, tokenizer)
    except ConfigError as err:
        findings.add_error(
            err,
            field="task.label.labels",
            remedy="Use words that the tokenizer has as one token, with the space before them if "
            "it needs one, or token ids.",
        )
    except EngineError as err:
        if (Path(config.engine.model or "") / "adapter_config.json").exists():
            findings.add_error(err, field="engine.model")


def _check_projector(config: RunConfig, folder: str, findings: Findings) -> None:
    """projector.json, its tensors, and the model's width."""
    try:
        spec = read_projector_spec(folder)
    except EngineError as err:
        remedy = "Write projector.json and projector.safetensors there; docs/configuration.md."
        findings.add_error(err, file=folder, field="engine.projector", remedy=remedy)
        return
    width = _model_number(config, "hidden_size")
    if width is not None and width != spec.output_dim:
        findings.add_error(
            EngineError(
                "the projector does not fit the model",
                expected=f"output_dim {width}, hidden_size of the model",
                got=f"output_dim {spec.output_dim}",
                where=folder,
                do="Use the projector that was trained with this model.",
                field="engine.projector",
            )
        )
    _check_projector_weights(Path(folder) / "projector.safetensors", spec, findings)


def _check_projector_weights(path: Path, spec: ProjectorSpec, findings: Findings) -> None:
    try:
        with path.open("rb") as handle:
            header, _ = safetensors_header(handle)
    except (OSError, ValueError) as err:
        findings.add_error(
            EngineError(
                "projector.safetensors cannot be read",
                got=quoted(str(err)),
                where=str(path),
                do="Write the weights again with safetensors.torch.save_file.",
                field="engine.projector",
            )
        )
        return
    for name, shape in spec.shapes().items():
        found = tuple(header[name]["shape"]) if name in header else None
        if found == shape or (found is None and name.endswith("bias")):
            continue
        findings.add_error(
            EngineError(
                f"the projector's tensor {name!r} is not what projector.json says",
                expected=f"shape {shape}",
                got="no such tensor" if found is None else f"shape {found}",
                where=str(path),
                do="Correct projector.json, or write the weights that belong to it.",
                field="engine.projector",
            )
        )


def _check_positions(config: RunConfig, findings: Findings) -> None:
    """Prompts that could be longer than the model has positions for."""
    longest = _model_number(config, "max_position_embeddings")
    items = len(config.sid.sizes) if config.sid else 0
    if longest is not None and config.prompt.max_tokens + items > longest:
        findings.add_error(
            ConfigError(
                "prompts may be longer than the model's positions",
                expected=f"at most {longest - items}",
                got=str(config.prompt.max_tokens),
                do=f"Set prompt.max_tokens to at most {longest - items}.",
                field="prompt.max_tokens",
                where=config.engine.model,
            )
        )


def _model_number(config: RunConfig, name: str) -> int | None:
    """A number of the model's config.json; None where it does not say."""
    if config.engine.model is None:
        return None
    try:
        raw: dict[str, Any] = json.loads((Path(config.engine.model) / "config.json").read_text())
    except (OSError, ValueError):
        return None  # said already
    value = raw.get(name, (raw.get("text_config") or {}).get(name))
    return int(value) if isinstance(value, int) else None

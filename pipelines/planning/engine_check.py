"""What would keep the engine from starting, as far as files tell: each problem said once, for a
plan, which raises the first, and for a look before it, which lists them all.

Nothing here imports torch: config.json and the headers of the weights are read, and the library of
the backend is asked in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.backends.apart import problems_apart
from engine.backends.registry import check_backend, spec_of
from engine.checkpoints.architecture import is_known, longest_position, read_config, text_config
from engine.checkpoints.files import checkpoint_problems, safetensors_header
from engine.prompts.projector_spec import ProjectorSpec, read_projector_spec
from engine.prompts.tokenizer import Tokenizer
from engine.tasks import suffix_tokens
from pipelines.catalog.items import longest_text
from schemas.errors import ConfigError, EngineError, NightshelfError, quoted
from schemas.settings import RunConfig


def backend_problems(config: RunConfig) -> Iterator[NightshelfError]:
    """What the settings lack or ask too much of for their backend.

    Raises:
        NightshelfError: there is no such backend.
    """
    engine, spec = config.engine, check_backend(config.engine)
    if engine.tensor_parallel > 1:
        yield ConfigError(
            "engine.tensor_parallel is above 1, and an engine has one GPU",
            expected="1",
            got=str(engine.tensor_parallel),
            do="Leave it out: run.workers starts one engine per GPU.",
            field="engine.tensor_parallel",
        )
    if spec.reads_checkpoint and engine.model is None:
        yield ConfigError(
            f"engine.model is missing for backend {engine.backend!r}",
            expected="a checkpoint folder",
            field="engine.model",
        )
    soft = spec.reads_checkpoint and config.prompt.parsed.uses("user_vector")
    if soft and engine.projector is None:
        yield ConfigError(
            "prompt.template has {user_vector} but engine.projector is unset",
            field="engine.projector",
        )
    if config.task.asks_native_beams and spec.native_beams is False:
        yield ConfigError(
            "task.generate.mode: native needs an engine with beams of its own",
            expected="a backend that has them, or task.generate.mode: constrained",
            got=engine.backend,
            field="task.generate.mode",
        )


def engine_problems(config: RunConfig, tokenizer: Tokenizer | None) -> Iterator[NightshelfError]:
    """Every reason that can be told without loading the model.

    Args:
        tokenizer: of the model; None where it cannot be read, which is another's to say.
    """
    engine, spec = config.engine, spec_of(config.engine.backend)
    if engine.model is None or not spec.reads_checkpoint:
        return
    found = list(checkpoint_problems(engine.model, own_forward=spec.own_forward))
    yield from found
    if engine.projector is not None and config.prompt.parsed.uses("user_vector"):
        yield from _projector_problems(engine.projector, engine.model)
    yield from _too_long(config, tokenizer, engine.model)
    if found:
        return
    # A library elsewhere may know types of models that the one here does not.
    if config.run.launcher == "local" or is_known(read_config(engine.model)):
        yield from problems_apart(spec, engine)


def _too_long(
    config: RunConfig, tokenizer: Tokenizer | None, model: str
) -> Iterator[NightshelfError]:
    """Prompts that leave no position for the longest item and a label behind it."""
    deep = _depth(config, tokenizer)
    longest = _positions(model)
    if longest is None:
        return
    at_most = config.prompt.max_tokens + _depth(config, tokenizer, texts=True)
    if tokenizer is not None and config.text is not None and at_most > longest:
        deep += longest_text(config, tokenizer)
    if config.prompt.max_tokens + deep > longest:
        yield too_long(config.prompt.max_tokens, deep, longest, model)


def fit_prompt(config: RunConfig, tokenizer: Tokenizer | None) -> RunConfig:
    """The configuration with a `prompt.max_tokens` that nobody set lowered to what the model holds
    besides an item.
    """
    engine, prompt = config.engine, config.prompt
    if engine.model is None or not spec_of(engine.backend).reads_checkpoint:
        return config
    if "max_tokens" in prompt.model_fields_set:
        return config
    longest = _positions(engine.model)
    most = None if longest is None else longest - _depth(config, tokenizer, texts=True)
    if most is None or most < 1 or most >= prompt.max_tokens:
        return config
    return config.model_copy(update={"prompt": prompt.model_copy(update={"max_tokens": most})})


def too_long(max_tokens: int, deep: int, longest: int, model: str) -> EngineError:
    """The error of prompts that leave no position for an item."""
    return EngineError(
        "prompts may be longer than the model's positions",
        expected=f"prompt.max_tokens + {deep} <= {longest}",
        got=f"prompt.max_tokens {max_tokens}",
        where=model,
        do=f"Set prompt.max_tokens to at most {longest - deep}.",
        field="prompt.max_tokens",
    )


def _depth(config: RunConfig, tokenizer: Tokenizer | None, *, texts: bool = False) -> int:
    """Tokens behind a prompt: an item's and those between it and a label.

    Items named by text are as long as the catalog's longest, which is read later: at most
    `text.max_tokens`, with `texts`.
    """
    deep = 0
    if config.sid is not None and config.task.gives_lists:
        deep = len(config.sid.sizes) + (config.sid.end_token is not None)
    elif config.text is not None and texts and config.task.gives_lists:
        deep = config.text.max_tokens
    if tokenizer is not None:
        deep += suffix_tokens(config, tokenizer)
    return deep


def _positions(folder: str) -> int | None:
    """Positions of the model; None where its config.json does not say."""
    try:
        longest = longest_position(read_config(folder))
    except EngineError:
        return None  # said already
    return None if longest >= 1 << 30 else longest


def _projector_problems(folder: str, model: str) -> Iterator[EngineError]:
    """projector.json, its tensors, and the model's width."""
    try:
        spec = read_projector_spec(folder)
    except EngineError as err:
        err.field = err.field or "engine.projector"
        err.do = err.do or "Write projector.json and projector.safetensors there; see "
        "docs/configuration.md."
        yield err
        return
    try:
        width = text_config(read_config(model)).get("hidden_size")
    except EngineError:
        width = None  # said already
    if isinstance(width, int) and width != spec.output_dim:
        yield EngineError(
            "the projector does not fit the model",
            expected=f"output_dim {width} (the model's hidden size)",
            got=f"output_dim {spec.output_dim}",
            where=folder,
            do="Use the projector that was trained with this model.",
            field="engine.projector",
        )
    yield from _projector_weights(Path(folder) / "projector.safetensors", spec)


def _projector_weights(path: Path, spec: ProjectorSpec) -> Iterator[EngineError]:
    try:
        with path.open("rb") as handle:
            header, _ = safetensors_header(handle)
        shapes = {name: tuple(tensor["shape"]) for name, tensor in header.items()}
    except (OSError, ValueError, KeyError, TypeError) as err:
        yield EngineError(
            "projector.safetensors cannot be read",
            got=quoted(str(err)),
            where=str(path),
            do="Write the weights again with safetensors.torch.save_file.",
            field="engine.projector",
        )
        return
    for name, shape in spec.shapes().items():
        found = shapes.get(name)
        if found == shape or (found is None and name.endswith("bias")):
            continue
        yield EngineError(
            f"projector.safetensors: tensor {name!r} does not fit projector.json",
            expected=f"shape {shape}",
            got=f"shape {found}" if found else f"tensors {', '.join(sorted(shapes))}",
            where=str(path),
            do="Correct projector.json, or write the weights that belong to it.",
            field="engine.projector",
        )

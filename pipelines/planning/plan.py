"""Plan a run: list and check the inputs, hash everything that decides the result, cut it into
shards.

The run's id comes from those hashes: the same configuration on the same inputs is the same run, so
that running it again continues it, and any change starts another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain

from engine.prompts.tokenizer import check_model, load_tokenizer, vocab_size
from engine.tasks import tasks_of
from pipelines.inputs.unchanged import hash_model
from pipelines.planning.engine_check import backend_problems, engine_problems, fit_prompt
from pipelines.planning.input_tables import (
    check_inputs,
    list_inputs,
    num_shards,
    tables_of_spark,
    vector_dim,
)
from pipelines.planning.overlaps import overlapping
from pipelines.publish import check_output
from pipelines.storage import files
from schemas.errors import (
    AccessError,
    ConfigError,
)
from schemas.extras import missing_for
from schemas.runs import InputTable, RunPlan
from schemas.settings import RunConfig

_LAUNCH_ONLY = (
    "launcher",
    "workers",
    "max_attempts",
    "shard_timeout_s",
    "start_timeout_s",
    "price_per_hour",
    "metrics_dir",
    "keep_days",
)
_BATCH_ONLY = ("max_batch_tokens", "max_batch_users")


def plan_run(config: RunConfig) -> RunPlan:
    """Check everything that can be checked without a device, and say what will be done.

    Raises:
        ConfigError: a setting cannot be used, or the output is not writable.
        InputError: a table is missing, empty, or breaks its contract.
        EngineError: the engine could not start with this model, as far as its files tell.
    """
    if config.ds is None:
        raise ConfigError("no partition date", expected="--ds YYYY-MM-DD, or ds in the file")
    ds = config.ds
    for problem in chain(backend_problems(config), tables_of_spark(config), overlapping(config)):
        raise problem
    inputs, schemas = list_inputs(config)
    user_id, item_id = check_inputs(config, inputs, schemas)
    config = _check_model(config)
    check_writable(config)
    check_output(config, user_id, item_id)

    model, model_files = hash_model(config.engine.model, "engine.model")
    projector, projector_files = hash_model(config.engine.projector, "engine.projector")
    hashes = {
        "config": _hash_config(config),
        "inputs": _hash_inputs(inputs),
        "model": model,
        "projector": projector,
    }
    digest = files.hash_bytes(json.dumps(hashes, sort_keys=True).encode())
    run_id = f"{ds}-{_slug(config.surface)}-{digest[:12]}"
    return RunPlan(
        run_id=run_id,
        ds=ds,
        surface=config.surface,
        config=config,
        inputs=inputs,
        hashes=hashes,
        model_files={"model": model_files, "projector": projector_files},
        num_shards=num_shards(config, inputs["users"]),
        user_id_type=user_id,
        item_id_type=item_id,
        vector_dim=vector_dim(config, schemas["users"], inputs["users"]),
        run_dir=files.join(config.run.work_dir, run_id),
    )


def _check_model(config: RunConfig) -> RunConfig:
    """What can be told of the model from its files; the configuration with prompts that fit it."""
    tokenizer = load_tokenizer(config)
    check_model(config, tokenizer)
    for task in tasks_of(config):
        if (wrong := task.check(tokenizer, vocab_size(config))) is not None:
            raise wrong
    config = fit_prompt(config, tokenizer)
    for problem in engine_problems(config, tokenizer):
        raise problem
    return config


def check_writable(config: RunConfig) -> None:
    """Raise `ConfigError` for the first place that the run could not write to; `StorageError` where
    that cannot be told now: a full disk, a store that does not answer.
    """
    for problem in unwritable(config):
        raise problem


def unwritable(config: RunConfig) -> Iterator[ConfigError]:
    """An error for each place that the run could not write to, or with what is not installed."""
    for path, setting in (
        (config.output.path, "output.path"),
        (config.run.work_dir, "run.work_dir"),
        (config.run.metrics_dir, "run.metrics_dir"),
    ):
        if path is None:
            continue
        if path.startswith("memory:"):
            yield ConfigError(
                f"{setting} is in the memory of one process",
                expected="a folder, or an object store, that every process of the run sees",
                got=path,
                field=setting,
            )
            continue
        try:
            files.check_writable(path, setting)
        except AccessError as err:
            yield err
    yield from missing_for(config)


def _hash_config(config: RunConfig) -> str:
    """Everything in the configuration that decides the rows: not how it is launched, and not how
    users are batched, which changes no item and no score beyond the stated tolerance.
    """
    kept = config.model_dump(mode="json")
    del kept["audit"], kept["report"], kept["spark"]
    for section, names in (("run", _LAUNCH_ONLY), ("engine", _BATCH_ONLY)):
        for name in names:
            del kept[section][name]
    return files.hash_bytes(json.dumps(kept, sort_keys=True).encode())


def _hash_inputs(inputs: Mapping[str, InputTable]) -> str:
    told = {n: t.model_dump(mode="json", exclude_none=True) for n, t in inputs.items()}
    text = json.dumps(told, sort_keys=True)
    return files.hash_bytes(text.encode())


def _slug(text: str) -> str:
    """A surface as part of a file name."""
    return "".join(char if char.isalnum() else "_" for char in text)[:40]

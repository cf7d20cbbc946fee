"""What a run will take, before it starts: tokens, rows through the model, memory, time and money.

Read from a sample of the inputs: lengths of the first users' histories and texts, candidates per
user. Time comes from the last run of the same model in the work folder; without one nobody knows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from engine.backends.registry import spec_of
from engine.prompts.projector_spec import read_projector_spec
from engine.prompts.tokenizer import Tokenizer, load_tokenizer
from engine.tasks import tasks_of
from engine.tasks.task import Load
from pipelines.inputs.shard_columns import first_users
from pipelines.shards.profile import published_marker
from pipelines.sources.input_columns import Wanted, read_columns
from pipelines.storage import files
from pipelines.storage.records import read_record
from schemas.errors import NightshelfError
from schemas.markers import Marker
from schemas.runs import InputTable, RunManifest, RunPlan
from schemas.settings import RunConfig
from schemas.tables import ID_TYPES, shape_of
from schemas.templates import Segment

_SAMPLE = 1000  # users
_ROWS = 8192  # of a pack where nothing else is said


class Estimate(BaseModel):
    """Numbers for one run; None where they cannot be known."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    users: int
    prompt_tokens: int  # of all prompts
    candidates: int  # over all users
    rows_forwarded: int  # about; prefixes that candidates share are counted for each
    model_bytes: int | None
    pack_bytes: int | None  # keys and values of one pack
    device_hours: float | None
    cost: float | None
    basis: str  # where the time comes from


def estimate(plan: RunPlan) -> Estimate:
    """Estimate a planned run. Reads the head of one file of each table."""
    config, users = plan.config, plan.inputs["users"].rows
    prompt, static = _prompt_tokens(plan)
    candidates = _candidates(plan)
    levels = len(config.sid.sizes) if config.sid else (config.text.max_tokens if config.text else 0)
    stateless = spec_of(config.engine.backend).stateless
    manifest, why_none = _last_run(plan)
    load = Load(
        prompt=prompt,
        candidates=candidates / max(users, 1),
        levels=levels,
        stateless=stateless,
        searched=_searched(manifest, config),
    )
    per_user = prompt if stateless else max(prompt - static, 0.0)
    per_user += sum(task.rows_forwarded(load) for task in tasks_of(config))
    rows = round(per_user * users)
    weights, kv = _model_sizes(config)
    rate, basis = _rows_per_second(manifest, why_none)
    hours = None if rate is None else rows / rate / 3600
    price = config.run.price_per_hour
    pack = config.engine.max_batch_tokens
    return Estimate(
        users=users,
        prompt_tokens=round(prompt * users),
        candidates=candidates,
        rows_forwarded=rows,
        model_bytes=weights,
        pack_bytes=None if kv is None else kv * (_ROWS if pack == "auto" else pack),
        device_hours=None if hours is None else round(hours, 4),
        cost=None if hours is None or price is None else round(hours * price, 4),
        basis=basis,
    )


def _prompt_tokens(plan: RunPlan) -> tuple[float, int]:
    """Mean tokens of a prompt, and how many of them are the same for all."""
    config = plan.config
    template, tokenizer = config.prompt.parsed, load_tokenizer(config)
    head = first_users(plan, [plan.inputs["users"].files[0].path], _SAMPLE)
    total, static = 0.0, 0
    for place, segment in enumerate(template.segments):
        size = _segment_tokens(config, segment, head, tokenizer)
        total += size
        if place < template.num_static:
            static += round(size)
    return min(total, float(config.prompt.max_tokens)), static


def _segment_tokens(
    config: RunConfig, segment: Segment, head: pa.Table, tokenizer: Tokenizer
) -> float:
    if segment.kind == "static":
        return len(tokenizer.encode_template(segment.text))
    if segment.kind == "user_vector":
        folder = config.engine.projector
        return 1.0 if folder is None else float(read_projector_spec(folder).num_tokens)
    if segment.kind in ("history", "user_sid"):
        lengths = pc.fill_null(pc.list_value_length(head.column(segment.column)), 0).to_numpy()
        if segment.kind == "user_sid":
            return float(lengths.mean()) if len(lengths) else 0.0
        items = np.minimum(lengths, config.prompt.history_max_items)
        separator = len(tokenizer.encode_template(config.prompt.history_separator))
        each = len(config.sid.sizes) if config.sid else 8.0
        return float((items * (each + separator)).mean()) if len(items) else 0.0
    texts = pc.fill_null(head.column(segment.column).cast(pa.string()), "").to_pylist()
    encoded = tokenizer.encode_texts(texts)
    return float(np.mean([len(one) for one in encoded])) if encoded else 0.0


def _candidates(plan: RunPlan) -> int:
    """Candidates of all users together."""
    table = plan.inputs.get("candidates")
    if table is None and plan.config.inputs.self_contained and plan.config.task.uses_candidates:
        table = plan.inputs["users"]
    if table is None:
        return 0
    shape = shape_of(table.columns)
    users = plan.inputs["users"].rows
    if shape == "long":
        return table.rows
    if shape == "shared":
        return table.rows * users
    lists = Wanted("item_ids", "item_ids", pa.list_(ID_TYPES[plan.item_id_type]))
    head = read_columns(table.name, table.files[0].path, [lists], _SAMPLE)
    lengths = pc.fill_null(pc.list_value_length(head.column("item_ids")), 0).to_numpy()
    mean = float(lengths.mean()) if len(lengths) else 0.0
    return round(mean * (table.rows if shape == "wide" else users))


def _model_sizes(config: RunConfig) -> tuple[int | None, int | None]:
    """Bytes of the weights, with the codebooks' rows of the head that bfloat16 keeps in float32
    too, and of the keys and values of one row.
    """
    if config.engine.model is None:
        return None, None
    folder = Path(config.engine.model)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    spec: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    spec = spec.get("text_config") or spec
    heads = spec.get("num_attention_heads", 1)
    width = spec.get("head_dim") or spec.get("hidden_size", 0) // max(heads, 1)
    numbers = 2 * spec.get("num_hidden_layers", 0) * spec.get("num_key_value_heads", heads) * width
    if config.engine.dtype == "float32":
        return weights, numbers * 4
    if config.sid is not None:
        weights += sum(config.sid.sizes) * spec.get("hidden_size", 0) * 4
    return weights, numbers * 2


def _latest_manifest(work_dir: str) -> RunManifest | None:
    """Of the run that was published last; None where none was."""
    latest: tuple[float, str] | None = None
    for name in files.list_names(work_dir):
        marker = published_marker(files.join(work_dir, name))
        if files.exists(marker):
            at = read_record(Marker, marker).published_at
            latest = max(latest or (at, name), (at, name))
    if latest is None:
        return None
    return read_record(RunManifest, files.join(work_dir, latest[1], "manifest.json"))


def _last_run(plan: RunPlan) -> tuple[RunManifest | None, str]:
    """The latest run of this model here; None, and why."""
    try:
        manifest = _latest_manifest(plan.config.run.work_dir)
    except (NightshelfError, FileNotFoundError) as err:  # an estimate: nothing hangs on it
        return None, f"the records of the last run cannot be read: {files.first_line(err)}"
    if manifest is None:
        return None, "no run to take the speed from"
    if manifest.plan.hashes["model"] != plan.hashes["model"]:
        return None, "the last run was of another model"
    return manifest, ""


def _searched(manifest: RunManifest | None, config: RunConfig) -> float | None:
    """Prefixes that a search forwarded for a user of that run, where it searched as this one will:
    the same task, and no other, for lists as long."""
    if manifest is None or not manifest.counts.users_searched:
        return None
    then, now = manifest.plan.config.task, config.task
    if (then.asked, then.k) != (now.asked, now.k) or len(now.asked) > 1:
        return None
    return manifest.counts.search_nodes / manifest.counts.users_searched


def _rows_per_second(manifest: RunManifest | None, why_none: str) -> tuple[float | None, str]:
    """Rows that a device forwarded per second in that run."""
    if manifest is None:
        return None, why_none
    seconds = sum(shard.seconds for shard in manifest.shards)
    rows = manifest.counts.rows_forwarded
    if not seconds or not rows:
        return None, "the last run forwarded nothing"
    return rows / seconds, f"the speed of run {manifest.plan.run_id}"


def table_bytes(table: InputTable) -> int:
    """Size of a table's files."""
    return sum(file.bytes for file in table.files)

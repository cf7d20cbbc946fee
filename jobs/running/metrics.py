"""A run's numbers for monitoring: `metrics.json`, and a Prometheus textfile.

`run.metrics_dir` is where node_exporter's textfile collector looks: one file per surface, replaced
by each run. Source of the format: Prometheus text exposition, written by prometheus_client.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from pipelines.storage import files
from schemas.extras import missing_extra
from schemas.runs import RunManifest

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_HELP = {
    "users_in": "Users of the input.",
    "users_recommended": "Users with recommendations.",
    "users_embedded": "Users with an embedding.",
    "users_quarantined": "Users set aside.",
    "users_without_eligible": "Users with nothing to recommend.",
    "candidates_in": "Candidates of the input.",
    "candidates_scored": "Candidates scored.",
    "rows_published": "Rows published.",
    "rows_quarantined": "Rows of the quarantine.",
    "exact_share": "Share of lists proven exact.",
    "nodes_per_user": "Prefixes that a search forwarded, per user.",
    "rounds_per_user": "Passes of the model that a search took, per user.",
    "stopped_share": "Share of searches that ended as beams.",
    "legal_mass": "Mean probability that the first token stays in the catalog.",
    "shards": "Shards of the run.",
    "shards_failed": "Shards that failed.",
    "seconds": "Time in which shards were at work.",
    "command_seconds": "Wall time of the command that ended the run.",
    "unknown_history_share": "Share of history items that the catalog does not have.",
    "history_rows_share": "Share of rows whose item is in the user's own history.",
    "distinct_lists": "Share of distinct lists.",
    "engine_seconds": "Time in the engine, all shards.",
    "users_per_s": "Users per second in which shards were at work.",
    "prompt_tokens": "Tokens of all prompts.",
    "reused_tokens": "Prompt tokens that were not forwarded again.",
    "truncated_tokens": "History tokens dropped to fit.",
    "rows_forwarded": "Rows that went through the model.",
    "rows_naive": "Rows if every candidate and beam sent its prompt again.",
    "device_hours": "Time that shards held a device.",
    "cost": "Price of the device hours.",
}


def write_metrics(manifest: RunManifest) -> None:
    """Write the run's metrics into its folder and, if there is one, `run.metrics_dir`."""
    plan = manifest.plan
    files.write_json(files.join(plan.run_dir, "metrics.json"), manifest.summary())
    if missing_extra("metrics", "a Prometheus textfile"):
        return  # nobody asked for one: a plan with run.metrics_dir would have been refused
    from prometheus_client import generate_latest, write_to_textfile

    registry = _registry(manifest)
    files.write_bytes(files.join(plan.run_dir, "metrics.prom"), generate_latest(registry))
    if plan.config.run.metrics_dir is not None:
        folder = Path(plan.config.run.metrics_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = quote(plan.surface, safe="")
        write_to_textfile(str(folder / f"nightshelf_{name}.prom"), registry)


def _registry(manifest: RunManifest) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry, Gauge

    registry = CollectorRegistry()
    labels = {"surface": manifest.plan.surface}
    summary = manifest.summary()
    for name, words in _HELP.items():
        value = summary.get(name)
        if value is not None:
            gauge = Gauge(f"nightshelf_{name}", words, labels, registry=registry)
            gauge.labels(**labels).set(float(value))
    status = Gauge(
        "nightshelf_run_status", "1 for how the run ended.", [*labels, "status"], registry=registry
    )
    for state in ("published", "failed", "refused"):
        status.labels(status=state, **labels).set(manifest.status == state)
    info = Gauge("nightshelf_run_info", "The run.", [*labels, "run_id", "ds"], registry=registry)
    info.labels(run_id=manifest.plan.run_id, ds=manifest.plan.ds, **labels).set(1)
    if manifest.audit is not None:
        gate = Gauge(
            "nightshelf_audit_value", "Value of a gate.", [*labels, "gate"], registry=registry
        )
        passed = Gauge(
            "nightshelf_audit_passed", "Whether it passed.", [*labels, "gate"], registry=registry
        )
        for one in manifest.audit.gates:
            if one.verdict in ("passed", "warned", "refused"):
                passed.labels(gate=one.gate, **labels).set(one.passed)
            if one.value is not None:
                gate.labels(gate=one.gate, **labels).set(one.value)
    return registry

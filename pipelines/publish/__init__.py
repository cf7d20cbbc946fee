"""Publish: the one step that makes a run's rows visible. One module per table format."""

from __future__ import annotations

from pipelines.publish.parquet import publish_parquet
from schemas.runs import Published, RunPlan, ShardReceipt


def publish_run(plan: RunPlan, receipts: list[ShardReceipt]) -> Published:
    """Publish a run that passed its audit, in the configured format."""
    return publish_parquet(plan, receipts)

"""What people hear when a run fails or is late: a line in the log, and in a chat if there is one.

The workers' environment variable `NIGHTSHELF_WEBHOOK` holds the address of an incoming webhook that
takes `{"text": …}` (Slack, Mattermost and others do). Without it the line is in the log only. It is
no Airflow variable: Airflow gives those to tasks, but denies them to the callback of a deadline.
"""

from __future__ import annotations

import json
import logging
import os
import urllib.request
from collections.abc import Mapping
from typing import Any

WEBHOOK = "NIGHTSHELF_WEBHOOK"
_STANDS = {
    "publish": "Readers see the old rows or the new ones.",
    "report": "The rows are published.",
}
_log = logging.getLogger("airflow.task.nightshelf")


def failure_text(context: Mapping[str, Any]) -> str:
    """Which step of which run failed, and why."""
    instance, dag_run = context["task_instance"], context["dag_run"]
    markers = getattr(context["task"], "markers", None)
    waited = f" (waited for {', '.join(markers)})" if markers else ""
    return (
        f"{instance.dag_id}, run {dag_run.run_id}: {instance.task_id} failed in try "
        f"{instance.try_number}{waited}: {context.get('exception') or 'no reason is known'}. "
        + _STANDS.get(instance.task_id, "What was published before is unchanged.")
    )


def run_failed(context: Mapping[str, Any]) -> None:
    """`on_failure_callback` of every task; called once, when no try is left."""
    _tell(failure_text(context))


def run_late(surface: str, hours: float, context: Mapping[str, Any] | None = None) -> None:
    """Callback of the deadline: the run is not done so many hours after it was queued."""
    run = ((context or {}).get("dag_run") or {}).get("dag_run_id", "a run")
    _tell(f"nightshelf {surface}: {run} is not published {hours:g} hours after it was queued.")


def _tell(text: str) -> None:
    _log.error("%s", text)
    address = os.environ.get(WEBHOOK)
    if not address:
        return
    body = json.dumps({"text": text}).encode()
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(address, data=body, headers=headers)
        urllib.request.urlopen(request, timeout=10).close()
    except (OSError, ValueError) as err:  # the run has failed; this must not hide why
        _log.error("the webhook in %s cannot be reached: %s", WEBHOOK, err)

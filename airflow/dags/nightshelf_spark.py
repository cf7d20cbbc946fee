"""A step of a run as a Spark application. Imported only where a surface is launched on Spark.

The operator is the provider's. What is added: a missing connection is an error (the provider would
go on with a master called `yarn`), the exit code decides whether another try is of use, and the
application's last line of JSON is the result, where the driver runs here (client mode).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import BaseHook, Context
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException
from nightshelf_steps import MEANINGS, StepFailed, ids_and_counts, json_object


class NightshelfSparkOperator(SparkSubmitOperator):
    """`spark-submit` of one step.

    Args:
        step: `plan`, `prepare` or `score`.
        options: any argument of SparkSubmitOperator.
    """

    def __init__(self, *, step: str, options: dict[str, Any], **kwargs: Any) -> None:
        # A new submission is safe (the run resumes, the partition is locked) and the provider's
        # own default fails on YARN in cluster mode unless the ResourceManager can be asked.
        defaults = {"durable": False, "conn_id": "spark_default"}
        super().__init__(**(defaults | options), **kwargs)
        self.step = step
        self._result: dict[str, Any] = {}

    def execute(self, context: Context) -> dict[str, Any]:
        """Submit it and wait. Returns ids and counts; none of them in cluster modes.

        Raises:
            StepFailed: with the application's exit code, where spark-submit hands it on. In cluster
                modes it says 1 whatever happened; that is tried again.
        """
        self.application_args = [word for word in self.application_args or [] if word]
        try:
            BaseHook.get_connection(self._conn_id)
        except AirflowNotFoundException as err:
            reason = f"there is no Airflow connection {self._conn_id!r}"
            raise StepFailed(self.step, 2, reason) from err
        try:
            super().execute(context)
        except AirflowException as err:
            code = self._exit_code()
            final = code in MEANINGS and code not in (1, 4, 130, 143)
            reason = (self._result.get("error") or {}).get("message") or str(err)
            raise StepFailed(self.step, code, reason, final=final) from err
        return ids_and_counts(self._result)

    def _get_hook(self) -> SparkSubmitHook:
        hook = super()._get_hook()
        follow = hook._process_spark_submit_log
        hook._process_spark_submit_log = lambda lines: follow(self._watched(lines))
        return hook

    def _watched(self, lines: Iterator[Any]) -> Iterator[Any]:
        for line in lines:
            self._result = json_object(line) or self._result
            yield line

    def _exit_code(self) -> int:
        process = getattr(self._hook, "_submit_sp", None)
        return getattr(process, "returncode", None) or 1

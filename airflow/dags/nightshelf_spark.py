"""A step of a run as a Spark application. Imported only where a surface is launched on Spark.

The operator is the provider's. What is added: a missing connection is an error (the provider would
go on with a master called `yarn`), and the exit code decides whether another try is of use.
"""

from __future__ import annotations

from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import BaseHook, Context
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException
from nightshelf_steps import MEANINGS, StepFailed


class NightshelfSparkOperator(SparkSubmitOperator):
    """`spark-submit` of one step. Its result stays in the run's folder: XCom gets nothing.

    Args:
        step: `prepare` or `score`.
        options: any argument of SparkSubmitOperator.
    """

    def __init__(self, *, step: str, options: dict[str, Any], **kwargs: Any) -> None:
        # A new submission is safe (the run resumes, the partition is locked) and the provider's
        # own default fails on YARN in cluster mode unless the ResourceManager can be asked.
        defaults = {"durable": False, "conn_id": "spark_default"}
        super().__init__(**(defaults | options), **kwargs)
        self.step = step

    def execute(self, context: Context) -> None:
        """Submit it and wait.

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
            final = code in MEANINGS and code not in (1, 4, 130)
            raise StepFailed(self.step, code, str(err), final=final) from err

    def _exit_code(self) -> int:
        process = getattr(self._hook, "_submit_sp", None)
        return getattr(process, "returncode", None) or 1

"""Errors and results of requests."""

from tensorrt_llm.executor.utils import RequestError

__all__ = ["RequestError"]

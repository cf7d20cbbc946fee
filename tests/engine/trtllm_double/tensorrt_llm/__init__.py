"""A strict double of TensorRT-LLM's Python API, for tests on machines without it.

It refuses what upstream refuses (keywords, widths, layouts, limits, engines of the other kind), by
the contract beside it, and computes with the real model through transformers, so that answers are
checked and not only calls. What it does not do: run on a GPU, be fast, or prove anything about a
build of the real library.
"""

from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.sampling_params import LogitsProcessor, SamplingParams

__version__ = "double"
__all__ = ["LLM", "LogitsProcessor", "SamplingParams"]

"""Public names."""

from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.llm_args import CudaGraphConfig, KvCacheConfig
from tensorrt_llm.sampling_params import SamplingParams

__all__ = ["LLM", "CudaGraphConfig", "KvCacheConfig", "RequestError", "SamplingParams"]

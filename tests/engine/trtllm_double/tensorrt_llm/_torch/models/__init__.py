"""Models of the PyTorch runtime; importing them registers them."""

from tensorrt_llm._torch.models import modeling_qwen3

__all__ = ["modeling_qwen3"]

"""Input processors."""

from tensorrt_llm.inputs.registry import (
    MultimodalPlaceholderMetadata,
    create_input_processor,
    register_input_processor,
)

__all__ = ["MultimodalPlaceholderMetadata", "create_input_processor", "register_input_processor"]

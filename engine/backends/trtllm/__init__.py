"""The production backend: a decoder inside NVIDIA TensorRT-LLM."""

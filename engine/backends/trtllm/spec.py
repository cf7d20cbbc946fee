"""What the TensorRT-LLM backend says of itself before it starts."""

from __future__ import annotations

from engine.backends.spec import BackendSpec

CONTAINER = "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc27"
INSTALL = (
    f"Run inside NVIDIA's container {CONTAINER} or a later one, or, on Linux with Python 3.12 and "
    "a CUDA GPU, install tensorrt_llm from NVIDIA's package index. See docs/trtllm.md."
)

SPEC = BackendSpec(
    name="trtllm",
    create="engine.backends.trtllm.backend:create_backend",
    packages=("tensorrt_llm",),
    install=INSTALL,
    reads_checkpoint=True,
    stateless=True,
    native_beams=True,
    starts_processes=True,
    gpu="needed",
    checks="engine.backends.trtllm.checks:checkup",
)

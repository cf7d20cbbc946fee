"""What computes: the backends, and the registry that starts one by its name.

`torch` is the embedded default, `trtllm` runs TensorRT-LLM, `fake` computes log-probabilities from
a hash. `checked` holds any of them to the protocol in `engine.backend`.
"""

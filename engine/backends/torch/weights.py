"""Weights held against the model that config.json makes, before any of them is read.

The library's own loader is asked, with tensors that have a size and no content: what it finds
missing, left over or of another size it would find of the real ones. So there is one truth of what
an architecture needs, and it costs no memory and no time on the disk.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from engine.backends.torch.tree_attention import ATTENTION_NAME, OtherAttentionError
from engine.checkpoints import architecture
from engine.checkpoints.files import LAYER, loaded_files, safetensors_header
from schemas.errors import EngineError, quoted

log = logging.getLogger("nightshelf.engine")

LIBRARY_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
_FAR, _SMALL = 4, 1 << 26  # times the numbers of the files, and numbers that are always few
_MATRIX = 3  # dimensions of the largest weights; masks that old checkpoints hold have four
_LEFT_OVER = re.compile(r"\.(weight|bias)$")


def load_config(folder: str) -> Any:
    """config.json as transformers completes it.

    Raises:
        EngineError: it cannot be used.
    """
    quiet: Any = transformers_logging  # its functions carry no types
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as err:  # whatever a value trips over
        raise cannot_load(folder, err) from err
    _refuse_other_models(config, folder)
    return config


def load_problems(folder: str) -> Iterator[EngineError]:
    """What the library's loader would say of the sizes and names in the weights' headers.

    Raises:
        EngineError: config.json makes no model.
    """
    config = load_config(folder)
    try:
        with torch.device("meta"), no_init_weights(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            build: Any = AutoModelForCausalLM.from_config
            model = build(config, attn_implementation=ATTENTION_NAME)
    except OtherAttentionError as err:
        raise architecture.not_ours(str(err), folder) from err
    except Exception as err:
        if ATTENTION_NAME in str(err):
            return  # its attention cannot be replaced, which is said with the model's name
        raise cannot_load(folder, err) from err
    if (section := getattr(config, "quantization_config", None)) is not None:
        _check_quantiser(section, folder)  # which names and sizes weights as it likes
        return
    if (problem := _of_another_size(model, folder)) is not None:
        yield problem  # the loader would take memory for all of it
        return
    tried = str(config.model_type) in architecture.SCORED
    try:
        report = _load_nothing(folder, load_config(folder))
    except Exception as err:  # a loader that wants to look at numbers
        if tried and isinstance(err, RuntimeError):
            raise cannot_load(folder, err) from err
        log.debug("the weights of %s were not held against config.json: %s", folder, err)
        return
    yield from report_problems(report, config, folder)


def _check_quantiser(section: Any, folder: str) -> None:
    """Whether what reads quantised weights is known and installed; a GPU may be elsewhere.

    Raises:
        EngineError: it is not.
    """
    library: Any = AutoHfQuantizer
    try:
        if not library.supports_quant_method(section):
            return  # the library leaves it alone
        quantiser = library.from_config(section, pre_quantized=True)
        quantiser.validate_environment(device_map=None, weights_only=True)
    except (ImportError, ValueError) as err:
        raise cannot_load(folder, err) from err
    except Exception as err:
        log.debug("quantised weights of %s: %s", folder, err)


def report_problems(report: dict[str, Any], config: Any, folder: str) -> Iterator[EngineError]:
    """What is wrong by the library's report on what it loaded."""
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, found, wanted = mismatched[0]
        yield EngineError(
            f"the checkpoint's tensor {name!r} has another size than config.json says",
            expected=f"{tuple(wanted)}",
            got=f"{tuple(found)}; {len(mismatched)} such tensors",
            where=folder,
            do="Save model and config together, after resizing the embeddings.",
            field="engine.model",
        )
    if missing := sorted(report["missing_keys"]):
        yield EngineError(
            "the checkpoint lacks weights, which would be random",
            got=f"{len(missing)} missing, first {quoted(missing[:3])}",
            where=folder,
            do="Copy or download the checkpoint again, or save it with save_pretrained(folder).",
            field="engine.model",
        )
    if left := _left_over(report["unexpected_keys"], config, folder):
        yield EngineError(
            "the checkpoint has weights in its layers that config.json knows nothing of, and that "
            "would be left out",
            got=f"{len(left)} such tensors, first {quoted(left[:3])}",
            where=folder,
            do="Save model and config.json together: their layers, biases and model_type differ.",
            field="engine.model",
        )


def not_finite(folder: str) -> Iterator[EngineError]:
    """The first tensor of the files that holds NaN or infinite numbers."""
    for path in loaded_files(Path(folder)):
        with safe_open(str(path), framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  # no mapping
                tensor = handle.get_tensor(name)
                if not is_finite(name, tensor):
                    yield holds_nan(name, tensor, folder)
                    return


def check_finite(model: nn.Module, folder: str) -> None:
    """Look at every weight that was loaded.

    Raises:
        EngineError: one holds NaN or infinite numbers.
    """
    for name, parameter in model.named_parameters():
        if not is_finite(name, parameter.data):
            for error in not_finite(folder):  # by its name in the file
                raise error
            raise holds_nan(name, parameter.data, folder)


def is_finite(name: str, tensor: Tensor) -> bool:
    """Whether a weight can be calculated with. A bias may be -inf: a token that never comes."""
    if tensor.dtype not in _FLOATS or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # without a mask as large as the tensor
    never = name.endswith("bias") and bool(low == -torch.inf)
    return bool(high.isfinite()) and (bool(low.isfinite()) or never)


def holds_nan(name: str, tensor: Tensor, folder: str) -> EngineError:
    """The error of a weight that is not finite."""
    return EngineError(
        f"the checkpoint's tensor {name!r} holds NaN or infinite numbers",
        expected="finite numbers",
        got=f"{int((~tensor.isfinite()).sum()):,} of {tensor.numel():,} are not",
        where=folder,
        do="Use a checkpoint from before its training diverged, or save it again.",
        field="engine.model",
    )


def cannot_load(folder: str, error: Exception) -> EngineError:
    """The error of a checkpoint that the library refuses."""
    said = " ".join(str(error).split()) or type(error).__name__
    return EngineError(
        "the model cannot be loaded", got=quoted(said), where=folder, field="engine.model"
    )


def _refuse_other_models(config: Any, folder: str) -> None:
    """What config.json does not tell alone; and a classifier's checkpoint, which loads as a
    language model too and would score nonsense.
    """
    for problem in architecture.refusals(folder, config.to_dict(), own_forward=True):
        raise problem
    named = architecture.named(config.to_dict())
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if named and not known & set(named):
        raise architecture.not_causal(named, folder)


class _Unread:
    """A tensor of a file that nobody reads; to the loader, a slice that it may take whole."""

    def __init__(self, shape: list[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> torch.dtype:
        return self.dtype

    def __getitem__(self, key: object) -> _Unread:
        if key is not ...:
            raise TypeError(f"a part of a tensor is not known: {key!r}")
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(self.shape, dtype=dtype or self.dtype, device="meta")


def _load_nothing(folder: str, config: Any) -> dict[str, Any]:
    """The loader's report on the headers of the weights."""
    tensors: dict[str, _Unread] = {}
    for path in loaded_files(Path(folder)):
        with path.open("rb") as handle:
            for name, tensor in safetensors_header(handle)[0].items():
                dtype = _DTYPES.get(tensor["dtype"], torch.bfloat16)
                tensors[name] = _Unread(tensor["shape"], dtype)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    # What it finds missing it makes in memory; nobody fills it, so no memory is taken.
    with no_init_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, report = kinds[0].from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    found: dict[str, Any] = report
    return found


def _of_another_size(model: nn.Module, folder: str) -> EngineError | None:
    """The error of a config.json whose model is far larger than the weights beside it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in loaded_files(Path(folder)):
        with path.open("rb") as handle:
            header = safetensors_header(handle)[0]
            shapes |= {name: tuple(tensor["shape"]) for name, tensor in header.items()}
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    there = sum(map(math.prod, shapes.values()))
    if sum(map(math.prod, wanted.values())) <= _FAR * there + _SMALL:
        return None  # the loader tells what differs, and takes no more than a model's memory
    differ = sorted(n for n, shape in wanted.items() if shapes.get(n, shape) != shape)
    first = differ[0] if differ else next(iter(wanted))
    return EngineError(
        "config.json says a model that is far larger than the checkpoint's weights",
        expected=f"{first} {wanted[first]}",
        got=f"{shapes.get(first, 'no such tensor')}; {there:,} numbers in all",
        where=folder,
        do="Save model and config together.",
        field="engine.model",
    )


def _left_over(unexpected: list[str], config: Any, folder: str) -> list[str]:
    """Weights inside the model's layers, or of layers beyond them, that the library leaves out.

    Heads that predict more tokens than the next lie behind the last layer by right.
    """
    text = architecture.text_config(config.to_dict())
    layers = text.get("num_hidden_layers") or 0
    ahead = range(layers, layers + (text.get("num_nextn_predict_layers") or 0))
    sizes: dict[str, list[int]] = {}
    for path in loaded_files(Path(folder)):
        with path.open("rb") as handle:
            sizes |= {n: t["shape"] for n, t in safetensors_header(handle)[0].items()}
    left = []
    for name in sorted(unexpected):
        match = LAYER.match(name)
        if match is None or _LEFT_OVER.search(name) is None or int(match[1]) in ahead:
            continue
        most = 1 if name.endswith("bias") else _MATRIX
        if len(sizes.get(name, ())) <= most:
            left.append(name)
    return left

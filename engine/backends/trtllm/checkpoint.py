"""The checkpoint as TensorRT-LLM is given it: what its config says, and a folder that names our
model class.

TensorRT-LLM picks the model class, and the input processor, by `architectures` in config.json. The
user's folder is never written: a temporary one links to its files and has a config.json of its own.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.backends.torch.memory import ModelSizes
from engine.checkpoints.files import lacking
from schemas.errors import EngineError, quoted
from schemas.settings import EngineSettings

ARCHITECTURE = "NightshelfQwen3ForCausalLM"
_SERVED = "Qwen3ForCausalLM"  # the class that the plug-in extends
_TYPES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """Sizes of a checkpoint, from its config.json and its files."""

    folder: str
    architecture: str
    vocab_size: int
    max_positions: int
    sizes: ModelSizes
    weight_bytes: int
    quantised: str | None  # how the weights are stored, where not in plain floats

    @property
    def has_plugin(self) -> bool:
        """Whether our model class can stand in for the checkpoint's."""
        return self.architecture == _SERVED


def read_checkpoint(settings: EngineSettings) -> CheckpointFacts:
    """What the folder of the settings holds.

    Raises:
        EngineError: no config.json, no safetensors, or a config without the sizes of a decoder.
    """
    folder = Path(settings.model or "")
    for problem in lacking(str(folder)):
        raise problem
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        sizes = ModelSizes(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config.get("intermediate_size") or 4 * hidden),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            item_bytes=_TYPES[settings.dtype],
        )
        vocab_size = int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise EngineError(
            "the model folder is not a checkpoint of a decoder",
            expected="a config.json with its sizes",
            got=quoted(f"{type(err).__name__}: {err}"),
            where=str(folder),
        ) from err
    return CheckpointFacts(
        folder=str(folder),
        architecture=(config.get("architectures") or [""])[0],
        vocab_size=vocab_size,
        max_positions=int(config.get("max_position_embeddings") or 1 << 30),
        sizes=sizes,
        weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        quantised=_quantisation(folder, config),
    )


def _quantisation(folder: Path, config: dict[str, Any]) -> str | None:
    """The algorithm of a pre-quantised checkpoint: ModelOpt's own file, or the config's section."""
    path = folder / "hf_quant_config.json"
    if path.is_file():
        section = json.loads(path.read_text(encoding="utf-8")).get("quantization", {})
        return str(section.get("quant_algo") or "unknown")
    section = config.get("quantization_config")
    if section is None:
        return None
    return str(section.get("quant_algo") or section.get("quant_method") or "unknown")


def placeholder_id(facts: CheckpointFacts, settings: EngineSettings) -> int | None:
    """The token that stands in a prompt where a soft token comes: in the vocabulary, in no text.
    None: every id is a token of the tokenizer, and the settings name none.

    Only prompts for native beams need it; `encode` is given positions.

    Raises:
        EngineError: the settings name an id beyond the vocabulary.
    """
    named = settings.trtllm.placeholder_id
    if named is not None:
        if named >= facts.vocab_size:
            raise EngineError(
                "engine.trtllm.placeholder_id is not in the vocabulary",
                expected=f"an id below {facts.vocab_size}",
                got=str(named),
            )
        return named
    tokenizer = Tokenizer.from_file(str(Path(facts.folder) / "tokenizer.json"))
    last = facts.vocab_size - 1
    return last if tokenizer.id_to_token(last) is None else None


class PreparedFolder:
    """A temporary checkpoint folder whose config.json names our class.

    `close` removes it, or else the end of the process.
    """

    def __init__(self, folder: str, placeholder: int | None) -> None:
        source = Path(folder).resolve()
        self.path = tempfile.mkdtemp(prefix="nightshelf-trtllm-")
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        for file in source.iterdir():
            if file.name != "config.json":
                (Path(self.path) / file.name).symlink_to(file)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config["architectures"] = [ARCHITECTURE]
        config["nightshelf_placeholder_id"] = -1 if placeholder is None else placeholder
        text = json.dumps(config, indent=2) + "\n"
        (Path(self.path) / "config.json").write_text(text, encoding="utf-8")

    def close(self) -> None:
        """Remove the folder; the files it links to stay."""
        self._remove()

"""What the engine refuses is refused by `validate` and by `plan`, in the same sentence, from files
alone: nothing is prepared, and no worker is started for it.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from engine.backends.torch.backend import TorchBackend
from schemas.errors import EngineError
from tests.cases.helpers import CPU
from tests.factories import TINY_DECODER, tiny_model, write_config, write_inputs
from tests.right_or_refused.architectures import REFUSED, SCORES, save_model

REFUSALS = (2, 3, 5)


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def drop_weights(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    kept = {k: v for k, v in weights.items() if name not in k}
    save_file(kept, path, metadata={"format": "pt"})


def no_config(folder):
    (folder / "config.json").unlink()


def config_is_a_list(folder):
    (folder / "config.json").write_text("[]")


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def no_header(folder):
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def header_of_nonsense(folder):
    raw = b'{"a": {"dtype": "F32"}}'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)


def shard_missing(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def index_damaged(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')


def layer_missing(folder):
    edit_config(folder, num_hidden_layers=3)


def tensor_missing(folder):
    drop_weights(folder, "layers.1.mlp.up_proj.weight")


def head_missing(folder):
    drop_weights(folder, "lm_head")


def embedding_of_another_size(folder):
    edit_config(folder, vocab_size=70)


def change_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def every_mlp_of_another_size(folder):
    edit_config(folder, intermediate_size=80)


def one_norm_of_another_size(folder):
    def longer(weights):
        weights["model.layers.1.input_layernorm.weight"] = np.ones(33, dtype=np.float32)

    change_weights(folder, longer)


def other_heads(folder):
    edit_config(folder, num_attention_heads=8)


def a_norm_missing_in_every_layer(folder):
    drop_weights(folder, "k_norm")


def final_norm_missing(folder):
    drop_weights(folder, "model.norm.weight")


def layers_that_are_left_out(folder):
    edit_config(folder, num_hidden_layers=1, layer_types=["full_attention"])


def biases_that_are_left_out(folder):
    def biased(weights):
        for layer in range(2):
            name = f"model.layers.{layer}.self_attn.q_proj.bias"
            weights[name] = np.ones(32, dtype=np.float32)

    change_weights(folder, biased)


def norms_that_are_left_out(folder):
    edit_config(folder, model_type="llama", architectures=["LlamaForCausalLM"])


def a_nan(folder):
    def spoil(weights):
        weights["model.embed_tokens.weight"][63, 3] = np.nan

    change_weights(folder, spoil)


def an_infinity(folder):
    def spoil(weights):
        weights["model.layers.1.mlp.up_proj.weight"][3, 3] = -np.inf

    change_weights(folder, spoil)


def classes_that_are_numbers(folder):
    edit_config(folder, architectures=[3])


def positions_below_none(folder):
    edit_config(folder, max_position_embeddings=-5)


def rope_of_base_zero(folder):
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 0})


def norms_of_a_negative_epsilon(folder):
    edit_config(folder, rms_norm_eps=-1.0)


def quantised_in_fp8(folder):
    edit_config(folder, quantization_config={"quant_method": "fp8"})


def quantised_by_nobody_knows_what(folder):
    edit_config(folder, quantization_config={"bits": 4})


def pad_beyond_the_vocabulary(folder):
    edit_config(folder, pad_token_id=100277)


def heads_that_do_not_divide(folder):
    edit_config(folder, num_key_value_heads="two")


def rope_of_no_known_type(folder):
    edit_config(folder, rope_parameters=None, rope_scaling={"rope_type": "spiral", "factor": 2.0})


def rope_that_lacks_its_factor(folder):
    edit_config(folder, rope_parameters=None, rope_scaling={"rope_type": "linear"})


def activation_of_no_known_name(folder):
    edit_config(folder, hidden_act="gelo")


def quantised(folder):
    edit_config(folder, quantization_config={"quant_method": "aqlm", "bits": 4})


def encoder_decoder(folder):
    edit_config(folder, is_encoder_decoder=True)


def classifier(folder):
    shutil.rmtree(folder)
    shape = {**TINY_DECODER, "tie_word_embeddings": False}
    Qwen3ForSequenceClassification(Qwen3Config(**shape)).save_pretrained(folder)
    tiny_model(folder.parent / "other")
    shutil.copy(folder.parent / "other" / "tokenizer.json", folder)


def layers_without_end(folder):
    edit_config(folder, num_hidden_layers=10**9)


def a_model_far_larger_than_its_weights(folder):
    edit_config(folder, intermediate_size=10**9)


def tokenizer_with_more(folder):
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens([AddedToken(f"<more_{i}>", normalized=False) for i in range(40)])
    tokenizer.save(path)


# what happens to a checkpoint -> what is said of it
BROKEN = {
    no_config: "no config.json",
    config_is_a_list: "config.json cannot be read",
    pickled: "no safetensors weights",
    truncated: "where its header says",
    no_header: "not a safetensors file",
    header_of_nonsense: "a file of its weights cannot be read",
    shard_missing: "files of the model's weights are missing",
    index_damaged: "a file of its weights cannot be read",
    layer_missing: "lacks weights",
    tensor_missing: "model.layers.1.mlp.up_proj.weight",
    head_missing: "lm_head.weight",
    embedding_of_another_size: "has another size than config.json says",
    every_mlp_of_another_size: "6 such tensors",
    one_norm_of_another_size: "model.layers.1.input_layernorm.weight",
    other_heads: "has another size than config.json says",
    a_norm_missing_in_every_layer: "k_norm",
    final_norm_missing: "model.norm.weight",
    layers_that_are_left_out: "that config.json knows nothing of",
    biases_that_are_left_out: "model.layers.0.self_attn.q_proj.bias",
    norms_that_are_left_out: "that config.json knows nothing of",
    a_nan: "tensor 'model.embed_tokens.weight' holds NaN",
    an_infinity: "tensor 'model.layers.1.mlp.up_proj.weight' holds NaN or infinite",
    classes_that_are_numbers: "the checkpoint is not a causal language model",
    positions_below_none: "the model has no positions",
    rope_of_base_zero: "does not score as its own library does",
    norms_of_a_negative_epsilon: "gets NaN from this checkpoint",
    quantised_in_fp8: "requires accelerate",
    quantised_by_nobody_knows_what: "has no `quant_method` attribute",
    pad_beyond_the_vocabulary: "the model cannot be loaded",
    heads_that_do_not_divide: "the model cannot be loaded",
    rope_of_no_known_type: "the model cannot be loaded",
    rope_that_lacks_its_factor: "the model cannot be loaded",
    activation_of_no_known_name: "the model cannot be loaded",
    quantised: "quant_method aqlm",
    encoder_decoder: "encoder-decoder",
    classifier: "not a causal language model",
    layers_without_end: "more than 10,000 missing",
    a_model_far_larger_than_its_weights: "a model that is far larger than the checkpoint's weights",
    tokenizer_with_more: "ids beyond the model's vocabulary",
}


def check(nightshelf, config: Path, said: str) -> str:
    """`validate` and `plan` refuse and say it, `run` says what `plan` did, and nothing is left."""
    shown = nightshelf("validate", config, "--output", "json", check=None)
    assert shown.code in REFUSALS
    assert any(said in json.dumps(p, ensure_ascii=False) for p in shown.json["problems"]), shown.out
    sentences = []
    for command in ("plan", "run"):
        done = nightshelf(command, config, "--output", "json", check=None)
        assert done.code in REFUSALS, done.err
        sentences.append(done.json["error"]["message"])
    assert said in sentences[0]
    assert sentences[0] == sentences[1]
    assert not list((config.parent / "runs").rglob("shard*")), "nothing is prepared"
    assert not list((config.parent / "out").rglob("*.parquet"))
    return sentences[0]


def torch_config(folder: Path, model: Path | str, **changes) -> Path:
    write_inputs(folder)
    changes = {"prompt__max_tokens": 64, "prompt__template": "w1 {history}", **changes}
    return write_config(
        folder, engine={"backend": "torch", "model": str(model), "device": "cpu"}, **changes
    )


@pytest.mark.parametrize("name", ["json:loads", "os.path:join", "builtins:print"])
def test_a_function_of_python_itself_is_no_backend(nightshelf, tmp_path, name):
    write_inputs(tmp_path)
    check(nightshelf, write_config(tmp_path, engine={"backend": name}), "makes no backend")


@pytest.mark.parametrize("name", REFUSED)
def test_another_architecture(nightshelf, tmp_path, name):
    model_type, changes, said = REFUSED[name]
    model = save_model(tmp_path / "model", model_type, changes)
    sentence = check(nightshelf, torch_config(tmp_path, model), said)
    with pytest.raises(EngineError) as refused:
        TorchBackend(model, "float32", CPU)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda f: f.__name__)
def test_a_checkpoint_that_cannot_be_loaded(nightshelf, tmp_path, breaks):
    model = tmp_path / "model"
    tiny_model(model)
    breaks(model)
    sentence = check(nightshelf, torch_config(tmp_path, model), BROKEN[breaks])
    with pytest.raises(EngineError) as refused:
        TorchBackend(str(model), "float32", CPU)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("content", ["{", "[]", '{"temperature": -1, "eos_token_id": "x"}'])
def test_generation_settings_of_a_checkpoint_are_not_read(nightshelf, tmp_path, content):
    model = tmp_path / "model"
    tiny_model(model)
    (model / "generation_config.json").write_text(content)
    nightshelf("run", torch_config(tmp_path, model))


def test_more_workers_than_gpus(nightshelf, tmp_path, model_folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = torch_config(tmp_path, model_folder, engine__device="auto", run__workers=3)
    shown = nightshelf("validate", config, "--output", "json", check=None)
    done = nightshelf("run", config, "--output", "json", check=None)
    assert (shown.code, done.code) == (3, 5)
    assert shown.json["problems"][0]["message"] in done.json["error"]["message"]
    assert "no problems" in nightshelf("validate", config, "--set", "run.workers=2").out


def test_files_that_are_not_loaded_do_not_count(nightshelf, tmp_path):
    """An older, sharded save of other sizes beside the file that the library takes."""
    model = tmp_path / "model"
    tiny_model(model)
    weights = {name: np.ones((3, 3), np.float32) for name in load_file(model / "model.safetensors")}
    save_file(weights, model / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    config = torch_config(tmp_path, model)
    nightshelf("validate", config)
    nightshelf("run", config)


def test_a_gpu_that_is_not_there(nightshelf, tmp_path, model_folder, monkeypatch):
    """A plan may be made elsewhere; `validate` speaks of this machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    config = torch_config(tmp_path, model_folder, engine__device="cuda")
    shown = nightshelf("validate", config, "--output", "json", check=None)
    done = nightshelf("run", config, "--output", "json", check=None)
    assert (shown.code, done.code) == (3, 5)
    assert shown.json["problems"][0]["message"] in done.json["error"]["message"]
    nightshelf("plan", config)


def test_an_adapter(nightshelf, tmp_path, model_folder):
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    check(nightshelf, torch_config(tmp_path, model), "adapters are not applied")


def test_more_tokens_than_positions(nightshelf, tmp_path, model_folder):
    config = torch_config(tmp_path, model_folder, prompt__max_tokens=254)
    check(nightshelf, config, "prompts may be longer than the model's positions")
    nightshelf("plan", config, "--set", "prompt.max_tokens=253")


def test_positions_that_turn_with_the_length(nightshelf, tmp_path, model_folder):
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    edit_config(model, rope_parameters=None, rope_scaling=rope)
    check(nightshelf, torch_config(tmp_path, model), "prompt.max_tokens + 3 <= 16")


@pytest.mark.parametrize("words", [3, 12])
def test_the_longest_text_of_the_catalog_counts(nightshelf, tmp_path, model_folder, words):
    """Items named by text: as long as the longest is, not as `text.max_tokens` allows."""
    config = torch_config(
        tmp_path, model_folder, sid=None, text={"column": "name", "max_tokens": 20},
        prompt__max_tokens=250, prompt__template="{history}", task={"k": 3, "score": {}},
    )  # fmt: skip
    catalog = pq.read_table(tmp_path / "catalog.parquet")
    names = [f"<a_{i % 5}><b_{i // 5 % 4}><c_{i // 20}>" for i in range(len(catalog))]
    names[-1] = "<a_1>" * words  # a token each
    catalog = catalog.append_column("name", pa.array(names))
    pq.write_table(catalog, tmp_path / "catalog.parquet")
    if words > 6:
        check(nightshelf, config, f"prompt.max_tokens + {words} <= 256")
    else:
        nightshelf("plan", config)
        nightshelf("run", config)


def test_the_default_of_max_tokens_is_what_the_model_holds(nightshelf, tmp_path, model_folder):
    config = torch_config(tmp_path, model_folder, prompt__max_tokens=None)
    nightshelf("validate", config)
    nightshelf("plan", config)
    done = nightshelf("run", config, "--output", "json")
    plan = json.loads((Path(done.json["run_dir"]) / "plan.json").read_text())
    assert plan["config"]["prompt"]["max_tokens"] == 256 - 3


@pytest.mark.parametrize(
    ("backend", "package"),
    [("torch", "torch"), ("torch", "transformers"), ("trtllm", "tensorrt_llm")],
)
def test_a_library_that_is_not_installed(
    nightshelf, tmp_path, model_folder, monkeypatch, backend, package
):
    def find(name):
        return None if name == package else object()

    monkeypatch.setattr("engine.backends.spec.find_spec", find)
    monkeypatch.setattr("engine.backends.spec.sys", type("sys", (), {"modules": {}}))
    config = torch_config(tmp_path, model_folder, engine__backend=backend)
    check(nightshelf, config, "cannot be loaded")


@pytest.mark.parametrize("fault", ["width", "name", "shape", "file", "spec"])
def test_a_projector_that_does_not_fit(nightshelf, tmp_path, model_folder, fault):
    folder = tmp_path / "projector"
    folder.mkdir()
    width = 16 if fault == "width" else 32
    spec = {"kind": "linear", "input_dim": 4, "output_dim": width, "num_tokens": 1}
    rows = 5 if fault == "shape" else width
    weights = {"w" if fault == "name" else "weight": np.zeros((rows, 4), dtype=np.float32)}
    if fault != "spec":
        (folder / "projector.json").write_text(json.dumps(spec))
    if fault != "file":
        save_file(weights, folder / "projector.safetensors")
    said = {
        "width": "the projector does not fit the model",
        "name": "does not fit projector.json",
        "shape": "does not fit projector.json",
        "file": "projector.safetensors cannot be read",
        "spec": "no projector.json",
    }[fault]
    config = torch_config(
        tmp_path, model_folder, engine__projector=str(folder), prompt__template="{user_vector}w1"
    )
    raw = config.read_text()
    assert "projector" in raw
    check(nightshelf, config, said)


def test_segments_that_no_shard_has_room_for(nightshelf, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.inputs.eligibility._MOST_CELLS", 5 * 60)
    tables = write_inputs(tmp_path)
    catalog = tables["catalog"].append_column("price", pa.array(range(60)))
    pq.write_table(catalog, tmp_path / "catalog.parquet")
    users = tables["users"].append_column("limit", pa.array(range(20, 60)))
    pq.write_table(users, tmp_path / "users.parquet")
    config = write_config(tmp_path, task={"generate": {}, "eligibility": "price < {user.limit}"})
    check(nightshelf, config, "too many segments")
    nightshelf("plan", config, "--set", "run.shard_users=1")
    few = users.set_column(4, "limit", pa.array([20 + i % 4 for i in range(40)]))
    pq.write_table(few, tmp_path / "users.parquet")
    nightshelf("plan", config)


@pytest.mark.parametrize("name", list(SCORES)[::4])
def test_what_runs_is_let_through(nightshelf, tmp_path, name):
    model = save_model(tmp_path / "model", *SCORES[name])
    config = torch_config(tmp_path, model)
    assert "no problems" in nightshelf("validate", config).out
    nightshelf("plan", config)


def test_a_type_that_was_not_tried_is_a_warning(nightshelf, tmp_path):
    model = save_model(tmp_path / "model", "flex_olmo", {"num_experts": 8, "pad_token_id": 0})
    done = nightshelf("validate", torch_config(tmp_path, model), "--output", "json")
    assert ["was not tried" in one["message"] for one in done.json["warnings"]] == [True]


def test_a_type_that_the_library_does_not_know(nightshelf, tmp_path, model_folder):
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    edit_config(model, model_type="qwen9", architectures=["Qwen9ForCausalLM"])
    config = torch_config(tmp_path, model)
    check(nightshelf, config, "the model cannot be loaded")
    nightshelf("plan", config, "--set", "run.launcher=spark")  # it may be known there


def test_a_plan_of_a_model_imports_no_torch(tmp_path, model_folder):
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    every_mlp_of_another_size(broken)
    config = torch_config(tmp_path, model_folder)
    code = (
        "import sys\nfrom schemas.config_file import load_config\n"
        "from pipelines.planning.plan import plan_run\nfrom pipelines.preflight import preflight\n"
        f"plan_run(load_config({str(config)!r}))\n"
        f"assert not preflight({str(config)!r}).problems\n"
        f'assert preflight({str(config)!r}, overrides=["engine.model={broken}"]).problems\n'
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""`nightshelf validate` lists everything at once, and says of an input what a run would say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from tests.factories import tiny_model, write_config, write_inputs


def rewrite(folder: Path, name: str, table: pa.Table) -> None:
    pq.write_table(table, folder / f"{name}.parquet")


def replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def without(table: pa.Table, name: str) -> pa.Table:
    return table.drop_columns([name])


def write_projector(folder: Path, *, width: int = 32, dim: int = 4) -> str:
    folder.mkdir()
    spec = {"kind": "linear", "input_dim": dim, "output_dim": width, "num_tokens": 1}
    (folder / "projector.json").write_text(json.dumps(spec))
    save_file({"weight": torch.zeros(width, dim)}, folder / "projector.safetensors")
    return str(folder)


def fixed(table: pa.Table, dim: int) -> pa.Table:
    vectors = np.zeros((len(table), dim), np.float32).tolist()
    return replaced(table, "embedding", pa.array(vectors, pa.list_(pa.float32(), dim)))


def found(report: dict, field: str, file: str = "", kind: str = "problems") -> list[dict]:
    return [p for p in report[kind] if p["field"] == field and p["file"].endswith(file)]


def test_what_is_right_has_no_problem(nightshelf, tmp_path):
    write_inputs(tmp_path)
    done = nightshelf("validate", write_config(tmp_path), "--output", "json")
    assert done.json == {"status": "valid", "exit_code": 0, "problems": [], "warnings": []}
    assert "a run can start" in nightshelf("validate", write_config(tmp_path)).out


def shaped(folder: Path, tables: dict[str, pa.Table], shape: str) -> None:
    """Candidates of another shape than `write_inputs` gives."""
    items = tables["catalog"].column("item_id")
    users = tables["users"].column("user_id")
    rewrite(
        folder,
        "candidates",
        {
            "long": pa.table({"user_id": users, "item_id": items.slice(0, len(users))}),
            "shared": pa.table({"item_id": items}),
            "segment": pa.table(
                {"segment": ["s0", "s1", "s2"], "item_ids": [items.to_pylist()] * 3}
            ),
        }[shape],
    )


@pytest.mark.parametrize("int_ids", [False, True], ids=["string ids", "int64 ids"])
@pytest.mark.parametrize("shape", ["long", "shared", "segment"])
def test_every_shape_of_candidates_passes(nightshelf, tmp_path, shape, int_ids):
    shaped(tmp_path, write_inputs(tmp_path, int_ids=int_ids), shape)
    config = write_config(tmp_path, task={"k": 5, "score": {}})
    report = nightshelf("validate", config, "--output", "json").json
    assert report["problems"] == report["warnings"] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"task": {"k": 3, "score": {"length_norm": "mean"}}},
        {"task": {"k": 3, "label": {"labels": ["y", "n"]}}},
        {"task": {"embed": {}}, "prompt__template": "{segment}", "inputs__catalog": None},
        {"task__eligibility": "title != {user.segment}", "prompt__template": "{segment}"},
    ],
    ids=["text", "labels", "embed", "eligibility"],
)
def test_every_kind_of_task_passes(nightshelf, tmp_path, changes):
    tables = write_inputs(tmp_path)
    texts = [f"film {i}" for i in range(60)]
    rewrite(tmp_path, "catalog", tables["catalog"].append_column("text", pa.array(texts)))
    named = {} if "task__eligibility" in changes else {"sid": None, "text": {"column": "text"}}
    config = write_config(tmp_path, **named, **changes)
    report = nightshelf("validate", config, "--output", "json").json
    assert report["problems"] == report["warnings"] == []


def test_ten_broken_things_are_all_listed_with_file_field_and_remedy(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    users = tmp_path / "users"
    users.mkdir()
    (tmp_path / "users.parquet").unlink()
    pq.write_table(fixed(tables["users"], 5), users / "a.parquet")  # 1: dims; 2: no bio
    (users / "b.parquet").write_bytes(b"")  # 3
    rewrite(
        tmp_path, "candidates", replaced(tables["candidates"], "user_id", pa.array(range(40)))
    )  # 4
    sids = tables["catalog"].column("sid").to_pylist()
    sids[7], sids[3] = [0, 0, 99], sids[4][:2]  # 5, 6
    catalog = replaced(tables["catalog"], "sid", pa.array(sids))
    rewrite(tmp_path, "catalog", pa.concat_tables([catalog, catalog.slice(9, 1)]))  # 7
    rewrite(tmp_path, "exclusions", without(tables["exclusions"], "item_id"))  # 8
    (tmp_path / "file").write_text("not a folder")
    config = write_config(
        tmp_path,
        surfaces="home",  # 9
        task__k=0,  # 10
        task__eligibility="marked = 'eu'",  # 11
        output__path="file/table",  # 12
        sid__sizes=[5, 4, 9],  # 13: tokens that the tokenizer lacks
        engine={
            "backend": "torch",
            "model": tiny_model(tmp_path / "model", vocab=30),  # 14: fewer rows than tokens
            "projector": write_projector(tmp_path / "projector", width=16),  # 15: another width
        },
        prompt__template="{user_vector}{text:bio}{history}",
        prompt__max_tokens=1024,  # 16: more than the model's 256 positions
        inputs__users="users",
    )
    done = nightshelf("validate", config, "--output", "json", check=3)
    report = done.json
    places = [
        ("embedding", "users/a.parquet"),
        ("bio", "users/a.parquet"),
        ("inputs.users", "users/b.parquet"),
        ("user_id", "candidates.parquet"),
        ("item_id", "catalog.parquet"),
        ("item_id", "exclusions.parquet"),
        ("surfaces", "run.yaml"),
        ("task.k", "run.yaml"),
        ("marked", "catalog.parquet"),
        ("output.path", "file/table"),
        ("engine.model", "model"),
        ("engine.projector", "projector"),
        ("prompt.max_tokens", "model"),
    ]
    for field, file in places:
        assert len(found(report, field, file)) == 1, (field, report["problems"])
    sid = [p["message"] for p in found(report, "sid", "catalog.parquet")]
    assert len(sid) == 2
    assert any("outside their level's codebook" in message for message in sid)
    assert any("the beginning of another" in message for message in sid)
    tokens = found(report, "sid.tokens", "model")
    assert ["<c_6>" in tokens[0]["got"], "id 30" in tokens[1]["got"]] == [True, True]
    for problem in report["problems"]:
        assert problem["remedy"], problem
        assert problem["file"], problem
        assert problem["expected"] or problem["got"], problem
    assert report["status"] == "invalid"
    assert len(report["problems"]) == len(places) + 4
    text = nightshelf("validate", config, check=3).out
    assert f"{len(places) + 4} problems" in text
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


def test_only_wrong_settings_end_with_2_and_inputs_are_still_looked_at(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = write_config(
        tmp_path,
        surface=None,
        task__score_norm="full",
        prompt__template="{user_vector",
        audit={"min_coverage": 2},
        ds="28.11.2026",
        output__table="x",
    )
    report = nightshelf("validate", config, "--output", "json", check=2).json
    fields = {"surface", "task.score_norm", "prompt.template", "audit.min_coverage", "ds"}
    assert {p["field"] for p in report["problems"]} == fields | {"output.table"}
    assert all(p["kind"] == "config" and p["remedy"] for p in report["problems"])
    rewrite(tmp_path, "users", without(tables["users"], "user_id"))
    report = nightshelf("validate", config, "--output", "json", check=3).json
    assert len(found(report, "user_id", "users.parquet")) == 1
    assert len(report["problems"]) == 7


def test_settings_that_do_not_fit_together_are_listed_together(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(
        tmp_path,
        inputs__candidates=None,
        task__generate__width=[3],
        engine__backend="torch",
        run__work_dir="runs/{ds}",
        audit__min_legal_mass=0.5,
        task__score_norm="level",
    )
    report = nightshelf("validate", config, "--output", "json", check=2).json
    assert {p["field"] for p in report["problems"]} == {
        "inputs.candidates",
        "task.generate.width",
        "engine.model",
        "engine.projector",
        "run.work_dir",
        "audit.min_legal_mass",
    }


def test_rows_that_a_run_would_set_aside_are_warnings(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    users = tables["users"]
    vectors = users.column("embedding").to_pylist()
    vectors[1], vectors[2], vectors[3] = [float("nan"), 0, 0, 0], None, [1.0]
    ids = users.column("user_id").to_pylist()
    ids[8] = None
    users = replaced(users, "embedding", pa.array(vectors, pa.list_(pa.float32())))
    users = replaced(users, "user_id", pa.array(ids))
    rewrite(tmp_path, "users", pa.concat_tables([users, users.slice(20, 1)]))
    lists = tables["candidates"].column("item_ids").to_pylist()
    lists[0] = ["nobody knows"]
    candidates = replaced(tables["candidates"], "item_ids", pa.array(lists)).slice(0, 39)
    rewrite(tmp_path, "candidates", candidates)
    config = write_config(tmp_path, task={"k": 500, "score": {}}, audit__max_quarantine_rate=0.01)
    report = nightshelf("validate", config, "--output", "json").json
    assert report["problems"] == []
    rules = {p["message"].split(":")[0].rpartition(" ")[2] for p in found(
        report, "embedding", "users.parquet", "warnings"
    )}  # fmt: skip
    assert rules == {"vector_not_finite", "null_vector", "vector_length"}
    assert len(found(report, "user_id", "users.parquet", "warnings")) == 2
    assert len(found(report, "audit.max_quarantine_rate", "users.parquet", "warnings")) == 1
    unknown = found(report, "item_ids", "candidates.parquet", "warnings")
    assert "nobody knows" in unknown[0]["got"]
    assert "u039" in found(report, "user_id", "candidates.parquet", "warnings")[0]["got"]
    assert found(report, "task.k", "catalog.parquet", "warnings")[0]["expected"] == "at most 60"
    summary = nightshelf("run", config, "--set", "audit.max_quarantine_rate=0.5", "--output",
                         "json").json  # fmt: skip
    assert summary["users_quarantined"] == 5  # as many as the warnings count


def test_prompts_that_cannot_be_built_are_warnings(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    texts = ["short"] * 40
    texts[6] = texts[9] = "x" * 500
    users = tables["users"].append_column("bio", pa.array(texts))
    lists = users.column("history").to_pylist()
    lists[3] = []
    rewrite(tmp_path, "users", replaced(users, "history", pa.array(lists)))
    prompt = {"template": "{text:bio}{user_vector}{history}", "max_tokens": 100}
    config = write_config(tmp_path, prompt=prompt)
    report = nightshelf("validate", config, "--output", "json").json
    (long,) = found(report, "prompt.max_tokens", "users.parquet", "warnings")
    assert long["got"] == "2 of the 40 users looked at, first u006"
    assert nightshelf("run", config, "--output", "json").json["users_quarantined"] == 2
    config = write_config(tmp_path, prompt={"template": "{history}", "max_tokens": 100})
    report = nightshelf("validate", config, "--output", "json").json
    (empty,) = found(report, "prompt.template", "users.parquet", "warnings")
    assert empty["got"] == "1 of the 40 users looked at, first u003"
    assert nightshelf("run", config, "--output", "json").json["users_quarantined"] == 1


BROKEN = {
    "no users": {"inputs__users": "nowhere/*.parquet"},
    "no catalog": {"inputs__catalog": "nowhere.parquet"},
    "unknown layout": {"inputs__catalog": "run.yaml"},
    "unknown column of users": {"task__eligibility": "title = {user.nothing}"},
    "types that do not compare": {"task__eligibility": "popularity contains 3"},
    "no ds": {"ds": None},
    "unknown backend": {"engine__backend": "tensorrt"},
    "no model": {
        "engine": {"backend": "torch", "model": "nowhere"},
        "prompt__template": "{history}",
    },
    "work_dir elsewhere": {"run__work_dir": "memory://runs"},
    "k column": {"task__k_column": "segment"},
    "sizes": {"sid__sizes": [5, 4, 3]},
    "slot": {"prompt__template": "{text:bio}"},
    "surface of null": {"surface": "__HIVE_DEFAULT_PARTITION__"},
}  # fmt: skip


@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN.keys())
def test_what_a_run_refuses_validate_names(nightshelf, tmp_path, changes):
    write_inputs(tmp_path)
    config = write_config(tmp_path, **changes)
    refused = nightshelf("run", config, "--output", "json", check=None)
    assert refused.code in (2, 3, 5)
    report = nightshelf("validate", config, "--output", "json", check=None).json
    assert report["exit_code"] in (2, 3)
    message = refused.json["error"]["message"]
    assert any(p["message"] in message or message.startswith(p["message"][:20])
               for p in report["problems"]) or changes == BROKEN["sizes"]  # fmt: skip
    assert all(p["remedy"] and p["file"] for p in report["problems"])


def test_the_files_of_a_model_are_looked_at(nightshelf, tmp_path):
    write_inputs(tmp_path)
    model = tmp_path / "model"
    tiny_model(model)
    for name in ("tokenizer.json", "model.safetensors"):
        (model / name).unlink()
    (model / "adapter_config.json").write_text("{}")
    engine = {"backend": "torch", "model": str(model)}
    config = write_config(tmp_path, engine=engine, prompt__template="{history}")
    report = nightshelf("validate", config, "--output", "json", check=3).json
    messages = " ".join(p["message"] for p in report["problems"])
    assert "no safetensors weights" in messages
    assert "no tokenizer" in messages


def test_a_file_that_is_no_configuration_ends_with_2(nightshelf, tmp_path):
    report = nightshelf("validate", tmp_path / "no.yaml", "--output", "json", check=2).json
    assert "does not exist" in report["problems"][0]["message"]
    (tmp_path / "bad.yaml").write_text("a: [1")
    report = nightshelf("validate", tmp_path / "bad.yaml", "--output", "json", check=2).json
    assert "cannot be read" in report["problems"][0]["message"]

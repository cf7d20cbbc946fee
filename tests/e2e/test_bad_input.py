"""Everything a user can get wrong ends in a message that names it, or in a quarantined row.

`nightshelf` (tests/conftest.py) already asserts that no stack trace is printed.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.column_types import type_words
from tests.factories import tiny_model, write_config, write_inputs

PARTITION = "out/ds=2026-11-28/surface=home"


def rewrite(folder, name, table):
    pq.write_table(table, folder / f"{name}.parquet")


def replace_column(table, name, values):
    return table.set_column(table.schema.get_field_index(name), name, values)


def quarantine(folder) -> pl.DataFrame:
    return pl.concat(pl.read_parquet(p) for p in folder.glob("runs/*/staged/*-quarantine.parquet"))


# --- errors: exit code 3, naming file, column, expected and got --------------------------------


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("users", "user_id"),
        ("users", "embedding"),
        ("users", "history"),
        ("catalog", "sid"),
        ("catalog", "item_id"),
        ("candidates", "item_ids"),
        ("exclusions", "item_id"),
    ],
)
def test_a_missing_column_is_named(nightshelf, tmp_path, table, column):
    tables = write_inputs(tmp_path)
    rewrite(tmp_path, table, tables[table].rename_columns(
        [f"{column}x" if c == column else c for c in tables[table].column_names]
    ))  # fmt: skip
    err = nightshelf("run", write_config(tmp_path), check=3).err
    assert f"{table}.parquet" in err
    assert column in err
    if table != "candidates":
        assert f"did you mean '{column}x'" in err


@pytest.mark.parametrize(
    ("table", "column", "values"),
    [
        ("users", "embedding", pa.array(["a"] * 40)),
        ("users", "embedding", pa.array([[1, 2]] * 40)),
        ("users", "user_id", pa.array([1.5] * 40)),
        ("users", "history", pa.array(["i001"] * 40)),
        ("catalog", "sid", pa.array([1.0] * 60)),
        ("catalog", "popularity", pa.array(["many"] * 60)),
        ("candidates", "item_ids", pa.array(["i001"] * 40)),
    ],
)
def test_a_wrong_type_is_named_with_what_was_expected(nightshelf, tmp_path, table, column, values):
    tables = write_inputs(tmp_path)
    rewrite(tmp_path, table, replace_column(tables[table], column, values))
    err = nightshelf("run", write_config(tmp_path), check=3).err
    assert f"{table}: column {column!r} has the wrong type" in err
    assert "expected" in err
    assert f"got {type_words(values.type)}" in err
    assert f"{table}.parquet" in err


def test_ids_of_another_type_than_in_the_other_table_are_refused(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    numbers = pa.array(range(40))
    rewrite(tmp_path, "candidates", replace_column(tables["candidates"], "user_id", numbers))
    err = nightshelf("run", write_config(tmp_path), check=3).err
    assert "candidates" in err
    assert "expected string, got int64" in err


def test_an_empty_users_table_is_refused(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    rewrite(tmp_path, "users", tables["users"].slice(0, 0))
    assert "users: the table is empty" in nightshelf("run", write_config(tmp_path), check=3).err


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "the file is empty (0 bytes)"), (b"PAR1 nonsense", "cannot be read as Parquet")],
)
def test_a_file_that_is_not_parquet_is_named(nightshelf, tmp_path, content, message):
    write_inputs(tmp_path)
    folder = tmp_path / "users"
    folder.mkdir()
    (tmp_path / "users.parquet").rename(folder / "a.parquet")
    (folder / "b.parquet").write_bytes(content)
    config = write_config(tmp_path, inputs__users="users")
    err = nightshelf("run", config, check=3).err
    assert message in err
    assert "b.parquet" in err


def test_a_path_where_nothing_is_is_named(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, inputs__users="nowhere/*.parquet")
    err = nightshelf("run", config, check=3).err
    assert "users: no Parquet file is at the path" in err
    assert "nowhere" in err


def bad_sids(tables, how):
    sids = tables["catalog"].column("sid").to_pylist()
    sids[7] = how
    return replace_column(tables["catalog"], "sid", pa.array(sids))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ([0, 0, 99], "code outside its codebook: expected 0 to 5 at level 3, got 99"),
        ([0, -1, 0], "code outside its codebook"),
        ([0, 0, 0, 0], "wrong number of levels: expected 1 to 3 codes, got 4"),
        ([], "wrong number of levels"),
        (None, "has no semantic ID: got item 'i007'"),
        ([0, None, 0], "holds a null code"),
    ],
)
def test_a_semantic_id_outside_the_space_is_refused(nightshelf, tmp_path, how, message):
    tables = write_inputs(tmp_path)
    rewrite(tmp_path, "catalog", bad_sids(tables, how))
    err = nightshelf("run", write_config(tmp_path), check=3).err
    assert message in err
    assert "catalog.parquet" in err


def test_a_sid_that_is_a_prefix_of_another_is_refused(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    sids = tables["catalog"].column("sid").to_pylist()
    sids[3] = sids[4][:2]
    rewrite(tmp_path, "catalog", replace_column(tables["catalog"], "sid", pa.array(sids)))
    err = nightshelf("run", write_config(tmp_path), check=3).err
    assert "prefix of another" in err
    assert "(item 'i003') before" in err
    assert "(item 'i004')" in err
    assert "catalog.parquet" in err


def test_text_sids_with_a_foreign_token_are_refused_by_item(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    texts = [f"<a_{a}><b_{b}><c_{c}>" for a, b, c in tables["catalog"].column("sid").to_pylist()]
    rewrite(tmp_path, "catalog", replace_column(tables["catalog"], "sid", pa.array(texts)))
    nightshelf("run", write_config(tmp_path))  # the text form itself is fine
    texts[5] = "<a_1><b_1><d_1>"
    rewrite(tmp_path, "catalog", replace_column(tables["catalog"], "sid", pa.array(texts)))
    err = nightshelf("run", write_config(tmp_path), check=3).err
    assert "'<a_1><b_1><d_1>'" in err
    assert "i005" in err


def test_an_item_that_stands_twice_is_refused(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    twice = pa.concat_tables([tables["catalog"], tables["catalog"].slice(0, 2)])
    rewrite(tmp_path, "catalog", twice)
    err = nightshelf("run", write_config(tmp_path), check=3).err
    assert "an item stands more than once" in err
    assert "i000" in err


def test_sid_tokens_that_the_tokenizer_lacks_are_named(nightshelf, tmp_path):
    write_inputs(tmp_path)
    model = tiny_model(tmp_path / "model")
    config = write_config(
        tmp_path,
        engine={"backend": "torch", "model": model, "device": "cpu"},
        prompt__template="{history}",
        sid__sizes=[5, 4, 9],
    )
    err = nightshelf("run", config, check=3).err
    assert "not in the tokenizer" in err
    assert "<c_6>" in err


def test_sid_tokens_beyond_the_embeddings_are_refused(nightshelf, tmp_path):
    write_inputs(tmp_path)
    model = tiny_model(tmp_path / "model", vocab=30)
    config = write_config(
        tmp_path,
        engine={"backend": "torch", "model": model, "device": "cpu"},
        prompt__template="{history}",
    )
    err = nightshelf("run", config, check=3).err
    assert "no embedding" in err
    assert "ids below 30" in err
    assert "id 34" in err


# --- errors: exit code 2 and 5 --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task__kk": 3}, "task.kk: unknown key; did you mean 'k'?"),
        ({"taks": {}}, "taks: unknown key; did you mean 'task'?"),
        ({"task__generate__widht": 3}, "task.generate.widht: unknown key; did you mean 'width'?"),
        ({"task__k": 0}, "task.k: input should be greater than or equal to 1, got 0"),
        ({"task__score_norm": "full"}, "task.score_norm: input should be 'full_vocab'"),
        ({"engine__backend": "tensorrt"}, "engine.backend 'tensorrt' is not supported"),
        ({"prompt__template": "{user_vector"}, "unbalanced brace"),
        ({"prompt__template": "{user vector}"}, "a slot that cannot be read"),
        ({"sid__tokens": ["<a>", "<b>", "<c>"]}, "sid.tokens[0] cannot name codes"),
        ({"sid__sizes": [5, 4]}, "different lengths"),
        ({"surface": None}, "surface: required but missing"),
        ({"ds": "28.11.2026"}, "ds: must be a date like 2026-11-28"),
        ({"ds": None}, "no partition date"),
        ({"task": {"k": 3}}, "task needs 'score: {}', 'generate: {}' or both"),
        ({"inputs__candidates": None}, "task.score needs inputs.candidates"),
        ({"task__generate__width": [3]}, "task.generate.width is too short"),
        ({"engine__backend": "torch"}, "engine.model is missing"),
    ],
)
def test_a_wrong_setting_is_named(nightshelf, tmp_path, changes, message):
    write_inputs(tmp_path)
    err = nightshelf("run", write_config(tmp_path, **changes), check=2).err
    assert message in err
    assert "run.yaml" in err or "expected" in err


def test_all_wrong_settings_are_reported_at_once(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, task__k=0, surfaces="x", prompt__max_tokens="long")
    err = nightshelf("run", config, check=2).err
    assert "3 problems" in err


def test_a_missing_or_broken_file_and_wrong_options_end_with_2(nightshelf, tmp_path):
    assert "does not exist" in nightshelf("run", tmp_path / "no.yaml", check=2).err
    (tmp_path / "bad.yaml").write_text("a: [1")
    assert "cannot be read" in nightshelf("run", tmp_path / "bad.yaml", check=2).err
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    assert "--set cannot be read" in nightshelf("run", config, "--set", "task.k", check=2).err
    nightshelf("run", config, "--unknown", check=2)


def test_an_output_that_cannot_be_written_is_refused_before_any_work(nightshelf, tmp_path):
    write_inputs(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    config = write_config(tmp_path, output__path="file/table")
    done = nightshelf("run", config, "--output", "json", check=2)
    assert "output.path is not writable" in done.err
    assert done.json["error"]["kind"] == "config"
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: (m / "model.safetensors").unlink(), "no safetensors weights"),
        (lambda m: (m / "model.safetensors").write_bytes(b"x" * 99), "cannot be loaded"),
        (lambda m: (m / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda m: (m / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        (lambda m: (m / "config.json").unlink(), "no config.json"),
        (
            lambda m: (m / "config.json").write_text(
                (m / "config.json").read_text().replace("Qwen3ForCausalLM", "X").replace(
                    '"qwen3"', '"nosuchmodel"')
            ),
            "cannot be loaded",
        ),
    ],
    ids=["no weights", "bad weights", "no tokenizer", "bad tokenizer", "no config", "unknown"],
)  # fmt: skip
def test_a_model_that_cannot_be_used_ends_with_5(nightshelf, tmp_path, spoil, message):
    write_inputs(tmp_path)
    model = tiny_model(tmp_path / "model")
    spoil(tmp_path / "model")
    config = write_config(
        tmp_path,
        engine={"backend": "torch", "model": model, "device": "cpu"},
        prompt__template="{history}",
    )
    assert message in nightshelf("run", config, check=5).err


@pytest.mark.parametrize("workers", [0, 1])
def test_an_engine_that_cannot_start_says_so_without_a_trace(nightshelf_process, tmp_path, workers):
    write_inputs(tmp_path)
    config = write_config(
        tmp_path, engine__backend="tests.trouble:no_memory_backend", run__workers=workers
    )
    err = nightshelf_process("run", config, check=5).err
    assert "the engine cannot start: got RuntimeError: CUDA out of memory" in err


def test_a_model_folder_that_is_not_there_is_named(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(
        tmp_path,
        engine={"backend": "torch", "model": "nowhere", "device": "cpu"},
        prompt__template="{history}",
    )
    err = nightshelf("run", config, check=5).err
    assert "the model folder does not exist" in err
    assert "nowhere" in err


# --- rows: quarantined, counted, and the others unharmed ----------------------------------------


def broken_users(tables):
    """One user for each rule; returns the table and the rule by user."""
    users = tables["users"]
    vectors = users.column("embedding").to_pylist()
    vectors[1] = [float("nan"), 0, 0, 0]
    vectors[2] = [0, float("inf"), 0, 0]
    vectors[3] = [1.0, 2.0]
    vectors[4] = None
    vectors[5] = [1.0, None, 2.0, 3.0]
    ids = users.column("user_id").to_pylist()
    ids[8] = None
    users = replace_column(users, "embedding", pa.array(vectors, pa.list_(pa.float32())))
    users = replace_column(users, "user_id", pa.array(ids))
    users = pa.concat_tables([users, users.slice(20, 1)])
    rules = {
        "u001": "vector_not_finite",
        "u002": "vector_not_finite",
        "u003": "vector_length",
        "u004": "null_vector",
        "u005": "vector_not_finite",
        None: "null_user_id",
        "u020": "duplicate_user",
    }
    return users, rules


def test_bad_user_rows_are_quarantined_with_rule_and_payload(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    want = pl.read_parquet(tmp_path / PARTITION).drop("run_id").sort("user_id", "rank")
    users, rules = broken_users(tables)
    rewrite(tmp_path, "users", users)
    import shutil

    shutil.rmtree(tmp_path / "runs")
    summary = nightshelf("run", config, "--output", "json").json
    assert summary["users_in"] == 41
    assert summary["users_quarantined"] == len(rules) == 7
    assert summary["users_recommended"] == 34
    found = quarantine(tmp_path).filter(pl.col("table") == "users")
    assert dict(zip(found["key"], found["rule"], strict=True)) == rules
    assert found["file"].str.ends_with("users.parquet").all()
    payloads = {key: json.loads(text) for key, text in found.select("key", "payload").rows()}
    assert payloads["u003"] == {"embedding": [1.0, 2.0], "length": 2}
    assert payloads["u001"]["embedding"][0] == "NaN"
    # Nobody else's recommendations moved.
    rows = pl.read_parquet(tmp_path / PARTITION).drop("run_id").sort("user_id", "rank")
    gone = [r for r in rules if r not in (None, "u020")] + ["u008"]
    assert rows.equals(want.filter(~pl.col("user_id").is_in(gone)))
    shown = nightshelf("show", config, "--user", "u003").out
    assert "quarantined by rule vector_length" in shown
    assert "2 values, expected 4" in shown


def test_unknown_candidates_are_quarantined_and_the_rest_is_scored(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    lists = tables["candidates"].column("item_ids").to_pylist()
    lists[0] = ["i001", "nosuch", "i001", "i002", None]
    lists[1] = ["nosuch"]
    lists[2] = []
    lists[3] = None
    table = replace_column(tables["candidates"], "item_ids", pa.array(lists)).slice(0, 39)
    stranger = pa.table({"user_id": ["stranger"], "item_ids": [["i001", "i002"]]})
    rewrite(tmp_path, "candidates", pa.concat_tables([table, stranger]))
    rewrite(tmp_path, "exclusions", tables["exclusions"].slice(0, 0))
    config = write_config(tmp_path, task={"k": 5, "score": {}})
    summary = nightshelf("run", config, "--output", "json").json
    assert summary["users_in"] == 40
    assert summary["users_without_eligible"] == 4  # u001, u002, u003 and u039
    assert summary["users_recommended"] == 36
    found = quarantine(tmp_path).sort("key", "payload")
    assert found.select("key", "rule").rows() == [
        ("stranger", "user_not_in_users"),
        ("u000", "unknown_item"),
        ("u000", "unknown_item"),
        ("u001", "unknown_item"),
    ]
    rows = pl.read_parquet(tmp_path / PARTITION)
    mine = rows.filter(pl.col("user_id") == "u000")
    assert sorted(mine["item_id"]) == ["i001", "i002"]
    for user in ("u001", "u002", "u003", "u039"):
        shown = nightshelf("show", config, "--user", user).out
        assert "nothing eligible: no_eligible_candidate" in shown


def test_a_prompt_that_cannot_fit_is_quarantined(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    texts = ["short"] * 40
    texts[6] = "x" * 500
    texts[7] = None
    rewrite(tmp_path, "users", tables["users"].append_column("bio", pa.array(texts)))
    config = write_config(tmp_path, prompt__template="{text:bio}{history}", prompt__max_tokens=100)
    summary = nightshelf("run", config, "--output", "json").json
    assert summary["users_quarantined"] == 2
    found = quarantine(tmp_path).filter(pl.col("table") == "users")
    assert dict(zip(found["key"], found["rule"], strict=True)) == {
        "u006": "prompt_too_long",
        "u007": "null_slot",
    }
    again = nightshelf("run", config, "--set", "prompt.null_text=nothing", "--output", "json").json
    assert again["users_quarantined"] == 1


def test_users_for_whom_the_model_gives_nan_are_quarantined(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    texts = ["fine"] * 40
    texts[9] = "bad!"
    rewrite(tmp_path, "users", tables["users"].append_column("bio", pa.array(texts)))
    config = write_config(
        tmp_path, engine__backend="tests.trouble:nan_backend", prompt__template="{text:bio}"
    )
    summary = nightshelf("run", config, "--output", "json").json
    assert summary["users_quarantined"] == 1
    found = quarantine(tmp_path).filter(pl.col("table") == "users")
    assert found.select("key", "rule").rows() == [("u009", "score_not_finite")]
    rows = pl.read_parquet(tmp_path / PARTITION)
    assert not rows["score"].is_nan().any()
    assert "u009" not in rows["user_id"].to_list()


def test_too_many_quarantined_users_refuse_the_run(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    before = pl.read_parquet(tmp_path / PARTITION)
    nothing = pa.array([[float("nan")] * 4] * 30 + [[0.0] * 4] * 10, pa.list_(pa.float32()))
    rewrite(tmp_path, "users", replace_column(tables["users"], "embedding", nothing))
    err = nightshelf("run", config, check=6).err
    assert "quarantine_rate is 0.75, allowed <= 0.5" in err
    assert pl.read_parquet(tmp_path / PARTITION).equals(before), "yesterday must stay published"
    assert nightshelf("status", config, "--output", "json").json["runs"][1]["status"] in (
        "refused",
        "published",
    )


def test_a_fixed_size_list_with_nulls_shifts_nobody(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    want = pl.read_parquet(tmp_path / PARTITION).drop("run_id").sort("user_id", "rank")
    vectors = np.asarray(tables["users"].column("embedding").to_pylist(), dtype=np.float32)
    fixed = pa.array([*vectors.tolist()], pa.list_(pa.float32(), 4))
    holes = pa.array(
        [None if i % 7 == 3 else v for i, v in enumerate(vectors.tolist())], fixed.type
    )
    rewrite(tmp_path, "users", replace_column(tables["users"], "embedding", holes))
    summary = nightshelf("run", config, "--output", "json").json
    gone = [f"u{i:03d}" for i in range(40) if i % 7 == 3]
    assert summary["users_quarantined"] == len(gone)
    rows = pl.read_parquet(tmp_path / PARTITION).drop("run_id").sort("user_id", "rank")
    assert rows.equals(want.filter(~pl.col("user_id").is_in(gone)))


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("inputs.users", "s3://AKIA123:hunter2@bucket/users"),
        ("inputs.catalog", "https://host/catalog.parquet?sv=1&sig=hunter2"),
        ("output.path", "s3://key:hunter2@bucket/out"),
        ("inputs.exclusions", "https://host/x.parquet?X-Amz-Signature=hunter2"),
    ],
)
def test_credentials_in_a_path_are_refused_and_not_repeated(nightshelf, tmp_path, setting, path):
    write_inputs(tmp_path)
    done = nightshelf("run", write_config(tmp_path), "--set", f"{setting}={path}", check=2)
    assert f"{setting} holds what looks like a credential" in done.err
    assert "hunter2" not in done.err + done.out
    assert not (tmp_path / "runs").exists()


def test_a_container_of_azure_is_no_credential(nightshelf, tmp_path):
    write_inputs(tmp_path)
    path = "abfs://shelves@account.dfs.core.windows.net/users"
    done = nightshelf("plan", write_config(tmp_path), "--set", f"inputs.users={path}", check=None)
    assert "credential" not in done.err + done.out


@pytest.mark.parametrize("table", ["users", "candidates", "exclusions", "catalog"])
def test_damaged_pages_are_an_input_error_that_names_the_file(nightshelf, tmp_path, table):
    """The footer is whole, so that a listing finds nothing wrong."""
    write_inputs(tmp_path, num_users=400)
    path = tmp_path / f"{table}.parquet"
    rows = bytearray(path.read_bytes())
    rows[8:200] = b"\0" * 192
    path.write_bytes(rows)
    config = write_config(tmp_path)
    done = nightshelf("run", config, "--output", "json", check=3)
    error = done.json["error"]
    assert error["message"].startswith(f"{table}: rows cannot be read")
    assert f"{table}.parquet" in error["message"]
    found = nightshelf("validate", config, "--output", "json", check=3).json["problems"]
    assert {Path(problem["file"]).name for problem in found} == {f"{table}.parquet"}


def test_damaged_pages_of_what_is_read_besides(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    users = tables["users"]["user_id"]
    for name in ("truth", "people"):
        table = pa.table({"user_id": users, "item_id": ["i001"] * 40, "country": ["se"] * 40})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    args = ("evaluate", config, "--truth", tmp_path / "truth.parquet")
    args += ("--users", tmp_path / "people.parquet", "--by", "country")
    nightshelf(*args)
    for name in ("people", "truth"):
        path = tmp_path / f"{name}.parquet"
        rows = bytearray(path.read_bytes())
        rows[8:100] = b"\0" * 92
        path.write_bytes(rows)
        assert f"{name}.parquet" in nightshelf(*args, check=3).err.replace("\n", "")


def test_a_column_that_stands_twice_is_a_problem_of_validate_too(nightshelf, tmp_path):
    users = write_inputs(tmp_path)["users"]
    twice = pa.Table.from_arrays(
        [*users.columns, users.column("segment")], names=[*users.column_names, "segment"]
    )
    pq.write_table(twice, tmp_path / "users.parquet")
    config = write_config(tmp_path, prompt={"template": "{segment} {history}"})
    assert "stands 2 times" in nightshelf("run", config, check=3).err
    found = nightshelf("validate", config, "--output", "json", check=3).json["problems"]
    assert any("stands 2 times" in problem["message"] for problem in found)

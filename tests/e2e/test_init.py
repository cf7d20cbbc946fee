"""`nightshelf init`: what it writes for the layouts in use passes `validate` and runs unedited."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import AddedToken, Tokenizer, models

from engine.prompts.sid_vocabulary import Family, Vocabulary, read_vocabulary, split_code
from tests.cases.helpers import write_projector
from tests.factories import SIZES, random_codes, tiny_model, write_inputs

SMALL = ("--set", "run.workers=0")  # in this process: nothing else is changed


def codes_of(num: int = 60) -> np.ndarray:
    return random_codes(np.random.default_rng(3), num)


def write_users(folder: Path, items: Sequence, *, int_ids: bool = False, num: int = 30) -> None:
    rng = np.random.default_rng(4)
    history = [
        [items[i] for i in rng.choice(len(items), rng.integers(0, 7), replace=False)]
        for _ in range(num)
    ]
    table = {
        "user_id": list(range(num)) if int_ids else [f"u{u:02d}" for u in range(num)],
        "history": pa.array(history, pa.list_(pa.int64() if int_ids else pa.string())),
    }
    pq.write_table(pa.table(table), folder / "users.parquet")


def save_tokenizer(folder: Path, patterns: Sequence[str], more: Sequence[str] = ()) -> None:
    """w0 to w9, other added tokens, and the tokens of every level."""
    words = {f"w{i}": i for i in range(10)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokens = [
        pattern.replace("{code}", str(code))
        for pattern, size in zip(patterns, SIZES, strict=True)
        for code in range(size)
    ]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*more, *tokens)])
    tokenizer.save(str(folder / "tokenizer.json"))


def model_with(folder: Path, patterns: Sequence[str], more: Sequence[str] = ()) -> str:
    tiny_model(folder)
    save_tokenizer(folder, patterns, more)
    return str(folder)


LC_REC = ("<a_{code}>", "<b_{code}>", "<c_{code}>")
ONE_REC = ("<s_a_{code}>", "<s_b_{code}>", "<s_c_{code}>")


def lc_rec(folder: Path) -> str:
    codes = codes_of()
    index = {
        str(i): [t.replace("{code}", str(c)) for t, c in zip(LC_REC, row, strict=True)]
        for i, row in enumerate(codes)
    }
    (folder / "Games.index.json").write_text(json.dumps(index))
    titles = {str(i): {"title": f"Game {i}"} for i in range(len(codes))}
    (folder / "Games.item.json").write_text(json.dumps(titles))
    write_users(folder, list(index))
    return "Games.index.json"


def one_rec(folder: Path) -> str:
    codes = codes_of()
    sids = pa.array(codes.tolist(), pa.list_(pa.int64()))
    pids = list(range(1000, 1000 + len(codes)))
    pq.write_table(pa.table({"pid": pids, "sid": sids}), folder / "pid2sid.parquet")
    write_users(folder, pids, int_ids=True)
    return "pid2sid.parquet"


def plain(folder: Path) -> str:
    write_inputs(folder)
    return "catalog.parquet"


def flash_rec(folder: Path) -> str:
    keys = sorted({",".join(map(str, (*row, 1))) for row in codes_of().tolist()})
    (folder / "sids.json").write_text(json.dumps(dict.fromkeys(keys, 1)))
    write_users(folder, keys)
    return "sids.json"


def mini_one_rec(folder: Path) -> str:
    lines = [f"<a_{a}><b_{b}><c_{c}>\tGame {i}\t{i}" for i, (a, b, c) in enumerate(codes_of())]
    (folder / "info.txt").write_text("\n".join(lines) + "\n")
    write_users(folder, [str(i) for i in range(60)])
    return "info.txt"


def array(folder: Path) -> str:
    np.save(folder / "codes.npy", codes_of())
    write_users(folder, list(range(60)), int_ids=True)
    return "codes.npy"


def jsonl(folder: Path) -> str:
    first = (11, 16, 20)  # the ids that `save_tokenizer` gives, behind one other token
    lines = [
        json.dumps(
            {"item_id": f"i{n}", "token_ids": [int(f + c) for f, c in zip(first, row, strict=True)]}
        )
        for n, row in enumerate(codes_of())
    ]
    (folder / "catalog.jsonl").write_text("\n".join(lines))
    write_users(folder, [f"i{n}" for n in range(60)])
    return "catalog.jsonl"


LAYOUTS = {
    "LC-Rec": (lc_rec, LC_REC),
    "OpenOneRec": (one_rec, ONE_REC),
    "parquet": (plain, LC_REC),
    "FlashRec": (flash_rec, ONE_REC),
    "MiniOneRec": (mini_one_rec, LC_REC),
    "array": (array, ("<|sid_0_{code}|>", "<|sid_1_{code}|>", "<|sid_2_{code}|>")),
    "JSONL": (jsonl, LC_REC),
}


@pytest.mark.parametrize("with_model", [False, True], ids=["fake", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_runs_without_editing(nightshelf, tmp_path, layout, with_model):
    write, patterns = LAYOUTS[layout]
    catalog = write(tmp_path)
    config = tmp_path / "nightshelf.yaml"
    args = ["--users", tmp_path / "users.parquet", "--catalog", tmp_path / catalog, "-o", config]
    if with_model:
        args += ["--model", model_with(tmp_path / "model", patterns, ["<user>"])]
    elif layout == "JSONL":
        err = nightshelf("init", *args, check=3).err
        assert "--model DIR" in err
        return
    nightshelf("init", *args)
    report = nightshelf("validate", config, "--output", "json").json
    assert report["problems"] == []
    summary = nightshelf("run", config, *SMALL, "--output", "json").json
    assert summary["status"] == "published"
    assert summary["users_recommended"] + summary["users_quarantined"] == summary["users_in"]
    assert summary["users_recommended"] >= 0.7 * summary["users_in"]  # the rest has no history
    written = yaml.safe_load(config.read_text())
    if with_model:
        assert written["sid"] == {"sizes": list(SIZES), "tokens": list(patterns)}
        assert written["engine"]["model"] == "model"
        assert "<user>" in config.read_text(), "other tokens are named in a comment"
    assert len(written["sid"]["sizes"]) == 3
    assert written["inputs"] == {"users": "users.parquet", "catalog": catalog}
    assert "{history}" in written["prompt"]["template"]


def test_three_commands_in_a_shell(nightshelf_process, tmp_path):
    write_inputs(tmp_path)
    config = tmp_path / "nightshelf.yaml"
    tables = {n: tmp_path / f"{n}.parquet" for n in ("users", "catalog", "candidates",
                                                     "exclusions")}  # fmt: skip
    options = [word for name, path in tables.items() for word in (f"--{name}", path)]
    nightshelf_process("init", *options, "-o", config)
    nightshelf_process("validate", config)
    nightshelf_process("run", config)
    rows = pl.read_parquet(tmp_path / "recommendations")
    assert rows["user_id"].n_unique() == 40
    assert rows["source"].unique().to_list() == ["score"]


def test_vectors_need_a_projector_that_fits(nightshelf, tmp_path):
    write_inputs(tmp_path)
    model = tiny_model(tmp_path / "model")
    config = tmp_path / "nightshelf.yaml"
    args = ["--users", tmp_path / "users.parquet", "--catalog", tmp_path / "catalog.parquet"]
    args += ["--model", model, "-o", config]
    for dim, template in ((4, "{user_vector}{history}"), (5, "{history}")):
        folder = tmp_path / f"projector{dim}"
        write_projector(folder, input_dim=dim)
        nightshelf("init", *args, "--projector", folder, "--force")
        assert yaml.safe_load(config.read_text())["prompt"]["template"] == template
        assert nightshelf("validate", config, "--output", "json").json["problems"] == []
        nightshelf("run", config, *SMALL)
    assert "the projector takes 5" in config.read_text().replace("\n  # ", " ")


def test_the_markers_of_onerec_stand_around_semantic_ids(nightshelf, tmp_path):
    catalog = one_rec(tmp_path)
    model = model_with(tmp_path / "model", ONE_REC, ["<|sid_begin|>", "<|sid_end|>"])
    config = tmp_path / "nightshelf.yaml"
    nightshelf("init", "--users", tmp_path / "users.parquet", "--catalog", tmp_path / catalog,
               "--model", model, "-o", config)  # fmt: skip
    prompt = yaml.safe_load(config.read_text())["prompt"]
    assert prompt["template"] == "<|sid_begin|>{history}<|sid_end|><|sid_begin|>"
    assert prompt["history_separator"] == "<|sid_end|><|sid_begin|>"
    nightshelf("validate", config)
    assert nightshelf("run", config, *SMALL, "--output", "json").json["users_quarantined"] == 0


def test_semantic_ids_that_begin_others_get_an_end_token(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    sids = tables["catalog"].column("sid").to_pylist()
    sids[3] = sids[4][:2]
    catalog = tables["catalog"].set_column(1, "sid", pa.array(sids))
    pq.write_table(catalog, tmp_path / "catalog.parquet")
    config = tmp_path / "nightshelf.yaml"
    nightshelf("init", "--users", tmp_path / "users.parquet", "--catalog",
               tmp_path / "catalog.parquet", "-o", config)  # fmt: skip
    assert yaml.safe_load(config.read_text())["sid"]["end_token"] == "<sid_end>"
    assert nightshelf("validate", config, "--output", "json").json["problems"] == []
    nightshelf("run", config, *SMALL)


def test_a_catalog_of_texts_is_scored(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    catalog = tables["catalog"].drop_columns(["sid"])
    pq.write_table(catalog, tmp_path / "catalog.parquet")
    pq.write_table(tables["users"].select(["user_id", "segment"]), tmp_path / "users.parquet")
    config = tmp_path / "nightshelf.yaml"
    args = ["--users", tmp_path / "users.parquet", "--catalog", tmp_path / "catalog.parquet"]
    assert "only scored" in nightshelf("init", *args, "-o", config, check=2).err
    nightshelf("init", *args, "--candidates", tmp_path / "candidates.parquet", "-o", config)
    written = yaml.safe_load(config.read_text())
    assert written["text"]["column"] == "title"
    assert written["prompt"]["template"] == "{segment}"
    assert nightshelf("validate", config, "--output", "json").json["problems"] == []
    nightshelf("run", config, *SMALL)


def test_a_date_in_the_path_becomes_the_partition_date(nightshelf, tmp_path):
    write_inputs(tmp_path)
    day = tmp_path / "users" / "ds=2026-11-28"
    day.mkdir(parents=True)
    (tmp_path / "users.parquet").rename(day / "part-0.parquet")
    config = tmp_path / "nightshelf.yaml"
    nightshelf("init", "--users", day, "--catalog", tmp_path / "catalog.parquet", "-o", config)
    written = yaml.safe_load(config.read_text())
    assert written["inputs"]["users"] == "users/ds={ds}"
    assert written["ds"] == "2026-11-28"
    nightshelf("validate", config)


def test_a_column_of_another_name_is_pointed_out(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    users = tables["users"].rename_columns(["user_id", "emb", "clicks", "segment"])
    pq.write_table(users, tmp_path / "users.parquet")
    config = tmp_path / "nightshelf.yaml"
    args = ["--users", tmp_path / "users.parquet", "--catalog", tmp_path / "catalog.parquet"]
    nightshelf("init", *args, "-o", config)
    text = " ".join(config.read_text().replace("#", " ").split())
    assert "emb (of the right type, if its name were embedding)" in text
    assert "clicks (of the right type, if its name were history)" in text
    assert yaml.safe_load(config.read_text())["prompt"]["template"] == "{segment}"
    nightshelf("validate", config)
    pq.write_table(
        users.rename_columns(["uid", *users.column_names[1:]]), tmp_path / "users.parquet"
    )
    assert "'user_id' is missing" in nightshelf("init", *args, "-o", config, "--force", check=3).err


def test_nothing_is_written_over(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = tmp_path / "nightshelf.yaml"
    config.write_text("mine")
    args = ["--users", tmp_path / "users.parquet", "--catalog", tmp_path / "catalog.parquet"]
    assert "--force" in nightshelf("init", *args, "-o", config, check=2).err
    assert config.read_text() == "mine"
    nightshelf("init", *args, "-o", config, "--force", "--surface", "e mail")
    assert yaml.safe_load(config.read_text())["surface"] == "e mail"


def broken_catalogs(tables: dict[str, pa.Table]) -> dict[str, tuple[pa.Table, str]]:
    catalog = tables["catalog"]
    num = len(catalog)

    def with_sids(sids: list) -> pa.Table:
        return catalog.set_column(catalog.schema.get_field_index("sid"), "sid", pa.array(sids))

    return {
        "no id": (
            catalog.rename_columns(["id", *catalog.column_names[1:]]),
            "'item_id' is missing",
        ),
        "markers": (with_sids(["<|begin|><a_1><b_2><|end|>"] * num), "cannot be told"),
        "one pattern": (with_sids([["<s_1>", "<s_2>"]] * num), "of one pattern"),
        "two patterns": (with_sids([["<a_1>"], ["<z_1>"]] * (num // 2)), "in several ways"),
        "all null": (with_sids(pa.nulls(num, pa.list_(pa.int32()))), "no semantic IDs"),
    }


@pytest.mark.parametrize("how", ["no id", "markers", "one pattern", "two patterns", "all null"])
def test_a_catalog_that_cannot_be_told_ends_with_3(nightshelf, tmp_path, how):
    table, message = broken_catalogs(write_inputs(tmp_path))[how]
    pq.write_table(table, tmp_path / "catalog.parquet")
    args = ["--users", tmp_path / "users.parquet", "--catalog", tmp_path / "catalog.parquet"]
    err = nightshelf("init", *args, "-o", tmp_path / "x.yaml", check=3).err
    assert message in err
    assert "catalog.parquet" in err
    assert not (tmp_path / "x.yaml").exists()


def test_a_tokenizer_without_such_tokens_is_refused(nightshelf, tmp_path):
    write_inputs(tmp_path)
    model = model_with(tmp_path / "model", ("<a_{code}>", "<c_{code}>", "<e_{code}>"))
    err = nightshelf("init", "--users", tmp_path / "users.parquet", "--catalog",
                     tmp_path / "catalog.parquet", "--model", model, "-o", tmp_path / "x.yaml",
                     check=3).err  # fmt: skip
    assert "no tokens that could be these semantic IDs" in err
    assert "<a_{code}> x 5" in err


def test_levels_are_found_by_the_letter_or_the_number_that_counts():
    patterns = [f"<s_{x}_{{code}}>" for x in "abc"] + [f"<|sid_{n}_{{code}}|>" for n in range(4)]
    families = [Family(p, 8 if p.startswith("<s") else 4) for p in patterns]
    found = Vocabulary((*families, Family("<pad_{code}>", 9)), {}, ())
    assert [f.pattern for f in found.levels(3, [8, 8, 8])] == patterns[:3]
    assert [f.pattern for f in found.levels(4, [4] * 4)] == patterns[3:]
    assert found.levels(4, [5] * 4) is None
    assert found.levels(5) is None


def test_words_and_reserved_tokens_are_no_families(tmp_path):
    words = {w: i for i, w in enumerate(["a0", "a1", "a2", "<x_0>", "<x_1>", "<x_3>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a0"))
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(9)]
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in [*reserved, "[C0]", "[C1]"]])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read_vocabulary(str(tmp_path)).families == (
        Family("<x_{code}>", 2),
        Family("[C{code}]", 2),
    )


@pytest.mark.parametrize("text", ["<a>", "12", "<a_012>", "<{code}_1>", ""])
def test_tokens_without_a_code(text):
    assert split_code(text) is None

"""`nightshelf catalog`: every problem at once, facts that can be counted by hand, the trie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from engine.checkpoints.files import vocabulary_sizes
from engine.trees.sid_trie import build_trie
from pipelines.catalog.build import read_catalog
from pipelines.catalog.check import check_catalog
from pipelines.catalog.stats import catalog_stats
from schemas.config_file import load_config
from schemas.errors import CatalogError, EngineError
from schemas.settings import RunConfig
from tests.factories import random_codes, save_tokenizer, sid_space, tiny_model, write_config

SPACE = sid_space()


def configured(folder: Path, table: pa.Table | dict | None = None, **changes) -> RunConfig:
    """A configuration over this catalog."""
    if table is not None:
        table = table if isinstance(table, pa.Table) else pa.table(table)
        pq.write_table(table, folder / "catalog.parquet")
    return load_config(write_config(folder, **changes))


def rules(config: RunConfig) -> dict[str, int]:
    return {p.rule: p.count for p in check_catalog(config).problems}


BAD = [
    ("a", [0, 0, 0]),
    ("b", [1, 2]),
    ("c", [1, 2, 3]),  # b is its beginning
    ("d", [1, 2, 4]),  # … and d's: one SID that begins others
    ("a", [2, 0, 0]),
    ("a", [3, 0, 0]),
    (None, [2, 1, 0]),
    ("e", None),
    ("f", []),
    ("g", [1, 9, -1]),  # two codes of one item
    ("h", [0, 0, 0, 1]),
    ("i", [0, None, 0]),
    ("j", [0, 0, 0]),
]


def test_every_problem_is_reported_at_once(tmp_path):
    ids, sids = zip(*BAD, strict=True)
    table = {"item_id": ids, "sid": pa.array(sids, pa.list_(pa.int16()))}
    report = check_catalog(configured(tmp_path, table))
    assert {p.rule: (p.count, p.examples) for p in report.problems} == {
        "null_item_id": (1, ("row 6",)),
        "duplicate_item_id": (1, ("'a' in 3 rows",)),
        "null_sid": (1, ("item 'e'",)),
        "empty_sid": (1, ("item 'f'",)),
        "too_many_levels": (1, ("item 'h': 4 levels",)),
        "null_code": (1, ("item 'i': level 2",)),
        "code_out_of_range": (1, ("item 'g': code 9 at level 2, of 0 to 3",)),
        "prefix_conflict": (1, ("<a_1><b_2> (item 'b') begins <a_1><b_2><c_3> (item 'c')",)),
    }
    facts = report.catalog
    assert (facts.rows, facts.items, facts.distinct_sids) == (13, 5, 4)
    assert (facts.shared_sids, facts.items_sharing, facts.largest_group) == (1, 2, 2)
    assert facts.largest_group_sid == "<a_0><b_0><c_0>"
    assert facts.largest_group_items == ("'a'", "'j'")
    assert facts.sids_by_length == {2: 1, 3: 3}
    assert [(u.used, u.available) for u in facts.levels] == [(2, 5), (2, 4), (3, 6)]


@pytest.mark.parametrize("form", ["tokens", "dictionaries", "texts", "large"])
def test_wrong_tokens_are_found_in_every_form(tmp_path, form):
    rows = [["<a_1>", "<b_2>"], ["<a_9>", "<b_0>"], ["<a_0>", "<c_1>"], ["<x>"], [], None]
    sid = {
        "tokens": lambda: pa.array(rows),
        "dictionaries": lambda: pa.array(rows, pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        "texts": lambda: pa.array([None if r is None else "".join(r) for r in rows]),
        "large": lambda: pa.array(rows, pa.large_list(pa.large_string())),
    }[form]()
    found = rules(configured(tmp_path, {"item_id": list("abcdef"), "sid": sid}))
    unknown = {"unknown_token": 1, "unreadable_sid": 1} if form == "texts" else {"unknown_token": 2}
    others = {"null_sid": 1, "empty_sid": 1, "token_of_another_level": 1}
    assert found == {**unknown, **others}


def test_the_check_and_the_reader_agree_on_random_damage(tmp_path):
    """No problem here means that `read_catalog` takes it, and the other way round."""
    rng = np.random.default_rng(0)
    agreed = set()
    for _ in range(60):
        codes = random_codes(rng, 12, ragged=True)
        sids = [[int(c) for c in row if c >= 0] for row in codes]
        ids = [f"i{i}" for i in range(12)]
        for _ in range(rng.integers(0, 2)):
            row = int(rng.integers(0, 12))
            damage = rng.choice(["null", "long", "code", "short", "id", "empty", "hole"])
            if damage == "id":
                ids[row] = ids[row - 1]
            else:
                sids[row] = {
                    "null": None,
                    "long": [0, 0, 0, 0],
                    "code": [*sids[row][:-1], 6],
                    "short": sids[row][:1],
                    "empty": [],
                    "hole": [0, None, 0],
                }[str(damage)]
        table = {"item_id": ids, "sid": pa.array(sids, pa.list_(pa.int32()))}
        config = configured(tmp_path, table)
        try:
            items = read_catalog([config.inputs.catalog], SPACE).trie.num_items
        except CatalogError:
            items = None
        report = check_catalog(config)
        assert (items is None) == bool(report.problems)
        assert items in (None, report.catalog.items)
        agreed.add(items)
    assert agreed == {None, 12}


def test_files_that_cannot_be_read_are_problems_too(tmp_path):
    config = configured(tmp_path, inputs__catalog="none.parquet")
    assert rules(config) == {"unreadable": 1}
    assert check_catalog(config).catalog is None
    folder = tmp_path / "parts"
    folder.mkdir()
    pq.write_table(pa.table({"item_id": [1.5], "sid": [1], "title": [3]}), folder / "a.parquet")
    (folder / "b.parquet").write_bytes(b"no")
    problems = check_catalog(configured(tmp_path, inputs__catalog="parts")).problems
    assert [p.rule for p in problems] == ["columns", "columns", "columns", "unreadable"]
    (folder / "b.parquet").unlink()
    pq.write_table(pa.table({"item_id": ["a"], "sid": [[1]]}), folder / "a.parquet")
    pq.write_table(pa.table({"item_id": [1], "sid": [[1]]}), folder / "b.parquet")
    assert rules(configured(tmp_path, inputs__catalog="parts")) == {"columns": 1}
    empty = pa.table({"item_id": pa.array([], pa.string()), "sid": pa.array([], pa.string())})
    assert rules(configured(tmp_path, empty)) == {"empty": 1}


def test_a_catalog_without_a_usable_item_has_no_facts(tmp_path):
    report = check_catalog(configured(tmp_path, {"item_id": ["a"], "sid": [[99]]}))
    assert report.catalog is None
    assert [p.rule for p in report.problems] == ["code_out_of_range"]


# --- the model ------------------------------------------------------------------------------------

ONE_ITEM = {"item_id": ["a"], "sid": [[0, 0, 0]]}


def with_model(folder: Path, model: Path | str, **changes) -> RunConfig:
    engine = {"backend": "torch", "model": str(model), "device": "cpu"}
    prompt = {"template": "{history}"}
    return configured(folder, ONE_ITEM, engine=engine, prompt=prompt, **changes)


@pytest.fixture
def model(model_folder, tmp_path) -> Path:
    """A copy of the tiny model, to be broken."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def resize(model: Path, **rows: int) -> None:
    tensors = load_file(model / "model.safetensors")
    for ending, count in rows.items():
        (name,) = [n for n in tensors if n.endswith(f"{ending}.weight")]
        tensors[name] = torch.zeros(count, tensors[name].shape[1])
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    save_file(arrays, model / "model.safetensors")


def test_a_right_model_is_no_problem_and_its_sizes_are_told(tmp_path, model):
    report = check_catalog(with_model(tmp_path, model))
    assert report.problems == ()
    sizes = report.vocabulary
    assert (sizes.tokenizer, sizes.config, sizes.embedding, sizes.head) == (35, 64, 64, 64)


def test_sid_tokens_that_are_not_one_token_are_counted(tmp_path, model):
    save_tokenizer(model, (5, 2, 6))
    (problem,) = check_catalog(with_model(tmp_path, model)).problems
    assert (problem.rule, problem.count) == ("token_not_single", 2)
    assert problem.examples == ("<b_2>", "<b_3>")


def test_new_tokens_whose_embeddings_were_not_saved_are_found(tmp_path, model):
    """Adapters trained with new tokens and saved without their embeddings."""
    resize(model, embed_tokens=30)
    report = check_catalog(with_model(tmp_path, model))
    found = {p.rule: p for p in report.problems}
    assert set(found) == {
        "vocabulary_mismatch", "tokenizer_larger_than_model", "token_without_embedding",
    }  # fmt: skip
    assert found["token_without_embedding"].count == 5
    assert found["token_without_embedding"].examples[0] == "<c_1> (id 30)"
    assert found["tokenizer_larger_than_model"].count == 5
    assert found["vocabulary_mismatch"].examples == ("config.json 64", "embedding 30", "head 64")


def test_parts_are_read_from_all_files_of_a_checkpoint_and_adapters_do_not_count(model):
    whole = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    head = {n: t.numpy() for n, t in whole.items() if n.startswith("lm_head")}
    save_file(head, model / "model-00002-of-00002.safetensors")
    rest = {n: t.numpy() for n, t in whole.items() if not n.startswith("lm_head")}
    save_file(rest, model / "model-00001-of-00002.safetensors")
    fake = {"base_model.model.model.embed_tokens.weight": np.zeros((7, 2), np.float32)}
    save_file(fake, model / "adapter_model.safetensors")
    sizes = vocabulary_sizes(str(model))
    assert (sizes.embedding, sizes.head) == (64, 64)


@pytest.mark.parametrize("data", [b"", b"\0" * 40, b"\x04" + bytes(7) + b"nope"])
def test_damaged_weights_are_a_problem_beside_the_others(tmp_path, model, data):
    (model / "model.safetensors").write_bytes(data)
    save_tokenizer(model, (5, 2, 6))
    assert rules(with_model(tmp_path, model)) == {"checkpoint": 1, "token_not_single": 2}
    with pytest.raises(EngineError, match="a safetensors file cannot be read"):
        vocabulary_sizes(str(model))


def test_a_missing_tokenizer_or_config_is_a_problem(tmp_path, model):
    (model / "config.json").unlink()
    assert rules(with_model(tmp_path, model)) == {"checkpoint": 1}
    (model / "tokenizer.json").unlink()
    assert rules(with_model(tmp_path, model)) == {"tokenizer": 1}


def test_tied_embeddings_and_padding_are_right(tmp_path):
    model = Path(tiny_model(tmp_path / "padded", vocab=128))
    tensors = load_file(model / "model.safetensors")
    kept = {n: t.numpy() for n, t in tensors.items() if not n.startswith("lm_head")}
    save_file(kept, model / "model.safetensors")
    report = check_catalog(with_model(tmp_path, model))
    assert report.problems == ()
    assert report.vocabulary.head is None


# --- stats ----------------------------------------------------------------------------------------


def test_statistics_can_be_counted_by_hand(tmp_path):
    sids = [[0, 0, 0], [0, 0, 1], [0, 1, 5], [1, 2, 3], [1, 2, 3], [4, 0]]
    table = {"item_id": list(range(6)), "sid": pa.array(sids, pa.list_(pa.int32()))}
    stats = catalog_stats(configured(tmp_path, table))
    assert (stats.items, stats.sids, stats.shared_sids, stats.largest_group) == (6, 5, 1, 2)
    assert stats.first_level_children == 3
    # [0, 1, 5], [1, 2, 3] and [4, 0] have no sibling at their last token
    assert stats.forced_last_share == pytest.approx(3 / 5)
    first, second, third = stats.levels
    assert (first.nodes, first.children_min, first.children_max) == (3, 1, 2)
    assert first.children_mean == pytest.approx(4 / 3)
    assert first.forced_share == pytest.approx(2 / 3)
    assert (second.nodes, second.children_mean, second.forced_share) == (4, 4 / 3, 2 / 3)
    assert (third.nodes, third.children_mean, third.forced_share) == (4, None, None)
    # Every set is the whole catalog: its 3 first-level and 3 second-level inner nodes.
    for packing in stats.packing:
        assert packing.candidates == 6
        assert packing.rows_forwarded == 6
        assert packing.rows_per_token == 17
        assert packing.rows_without_last == 11


def test_statistics_are_the_same_every_time_and_measure_the_trie(tmp_path):
    codes = random_codes(np.random.default_rng(0), 400)
    table = {"item_id": np.arange(400), "sid": codes.tolist()}
    config = configured(tmp_path, table)
    stats = catalog_stats(config)
    assert stats == catalog_stats(config)
    assert stats.trie_bytes == build_trie(codes).num_bytes
    hundred, most = stats.packing
    assert (hundred.candidates, most.candidates) == (100, 400)
    assert hundred.rows_forwarded < hundred.rows_without_last == 200 < hundred.rows_per_token


def test_statistics_of_a_bad_catalog_are_refused(tmp_path):
    with pytest.raises(CatalogError, match="outside its codebook"):
        catalog_stats(configured(tmp_path, {"item_id": [1], "sid": [[99]]}))


# --- the commands ---------------------------------------------------------------------------------


def test_check_exits_0_or_3_and_ends_with_json(nightshelf, tmp_path):
    configured(tmp_path, ONE_ITEM)
    config = tmp_path / "run.yaml"
    assert "no problems" in nightshelf("catalog", "check", config).out
    found = nightshelf("catalog", "check", config, "--output", "json").json
    assert found["problems"] == []
    assert found["facts"]["items"] == 1
    assert found["facts"]["levels"][0] == {"level": 1, "used": 1, "available": 5}
    assert found["facts"]["vocabulary"] is None

    configured(tmp_path, {"item_id": ["a", "a", "[b]"], "sid": [[0, 0, 0], [9, 0, 0], [0, 9, 0]]})
    text = nightshelf("catalog", "check", config, check=3).out
    assert "2 problems" in text
    assert "duplicate_item_id" in text
    assert "item '[b]': code 9 at level 2" in text
    found = nightshelf("catalog", "check", config, "--output", "json", check=3).json
    by_rule = {problem["rule"]: problem for problem in found["problems"]}
    assert set(by_rule) == {"duplicate_item_id", "code_out_of_range"}
    assert set(by_rule["code_out_of_range"]) == {"rule", "count", "examples", "message"}
    assert by_rule["code_out_of_range"]["count"] == 2


def test_check_shows_the_model_s_sizes_and_what_is_shared(
    nightshelf, tmp_path, model_folder, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "110")
    table = {"item_id": [f"i{n}" for n in range(9)], "sid": [[0, 0, 0]] * 9}
    with_model(tmp_path, model_folder)
    pq.write_table(pa.table(table), tmp_path / "catalog.parquet")
    text = nightshelf("catalog", "check", tmp_path / "run.yaml").out
    assert "vocabulary, tokenizer" in text
    assert "names 9: 'i0', 'i1', 'i2', 'i3', 'i4' and 4 more" in " ".join(text.split())
    args = ("--output", "json")
    found = nightshelf("catalog", "check", tmp_path / "run.yaml", *args).json
    assert found["facts"]["vocabulary"]["embedding"] == 64


def test_stats_prints_tables_or_json(nightshelf, tmp_path):
    codes = random_codes(np.random.default_rng(0), 400)
    configured(tmp_path, {"item_id": np.arange(400), "sid": codes.tolist()})
    config = tmp_path / "run.yaml"
    text = nightshelf("catalog", "stats", config).out
    assert "forced last token" in text
    assert "rows forwarded per user" in text
    found = nightshelf("catalog", "stats", config, "--output", "json").json
    assert found["first_level_children"] == 5
    assert [level["nodes"] for level in found["levels"]][0] == 5


def test_errors_of_the_catalog_commands_are_those_of_the_others(nightshelf, tmp_path):
    for verb in ("check", "stats"):
        done = nightshelf("catalog", verb, tmp_path / "no.yaml", "--output", "json", check=2)
        assert done.json["error"]["kind"] == "config"
    configured(tmp_path, {"item_id": [1], "sid": [[99]]})
    assert (
        "outside its codebook" in nightshelf("catalog", "stats", tmp_path / "run.yaml", check=3).err
    )


def test_a_catalog_of_token_ids_is_checked_through_the_tokenizer(nightshelf, tmp_path, model):
    rows = [{"item_id": "a", "token_ids": [20, 25, 29]}, {"item_id": "b", "token_ids": [20, 63]}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = with_model(tmp_path, model, inputs__catalog="c.jsonl")
    report = check_catalog(config)
    assert [(p.rule, p.examples) for p in report.problems] == [
        ("unknown_token", ("item 'b': 'token id 63'",))
    ]
    assert report.catalog.largest_group_sid == "<a_0><b_0><c_0>"

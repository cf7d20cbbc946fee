"""Every layout in its published form, small, and what its reader makes of it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

from pipelines.catalog.build import read_catalog, read_codes, split_texts
from pipelines.catalog.readers import describe_catalog, list_catalog, read_file
from pipelines.planning.plan import plan_run
from schemas.config_file import load_config
from schemas.errors import CatalogError, StorageError, TableError
from tests.factories import bound_space, random_codes, sid_space, write_config, write_inputs

SPACE = sid_space()
CODES = [[1, 2, 3], [0, 0, 0], [4, 3, 5]]
TOKENS = [["<a_1>", "<b_2>", "<c_3>"], ["<a_0>", "<b_0>", "<c_0>"], ["<a_4>", "<b_3>", "<c_5>"]]


def dump(path: Path, value) -> Path:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return path


def index_json(folder: Path) -> Path:
    dump(folder / "Games.inter.json", {"0": [2, 1, 0]})
    items = {"0": {"title": "Zelda", "description": "x"}, "2": {"title": None}}
    dump(folder / "Games.item.json", items)
    return dump(folder / "Games.index.json", {str(i): t for i, t in enumerate(TOKENS)})


def id2sid_json(folder: Path) -> Path:
    return dump(folder / "id2sid.json", {f"B0{i}": t for i, t in enumerate(TOKENS)})


def info_txt(folder: Path) -> Path:
    titles = ['a "quoted one', "ünï\u2028code", "NULL"]
    lines = [
        "".join(t) + f"\t{title}\t{i}\n"
        for i, (t, title) in enumerate(zip(TOKENS, titles, strict=True))
    ]
    path = folder / "Games_5_2016-10-2018-11.txt"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def pid2sid_parquet(folder: Path) -> Path:
    table = {"pid": pa.array([70, 5, 33]), "sid": pa.array(CODES, pa.list_(pa.int64()))}
    pq.write_table(pa.table(table), folder / "pid2sid.parquet")
    return folder / "pid2sid.parquet"


def catalogue_jsonl(folder: Path) -> Path:
    bound = bound_space()
    rows = [
        {
            "item_id": f"sku-{i}",
            "token_ids": [int(bound.token_ids[lv][c]) for lv, c in enumerate(codes)],
            "metadata": {"title": "2026-01-01", "n": 1} if i == 0 else {},
        }
        for i, codes in enumerate(CODES)
    ]
    path = folder / "catalogue.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return path


def sid_vocabulary(folder: Path) -> Path:
    return dump(folder / "vocab.json", {",".join(map(str, codes)): 1 for codes in CODES})


def sid_vocabulary_with_end(folder: Path) -> Path:
    return dump(folder / "vocab_l4.json", {f"{','.join(map(str, c))},1": 1 for c in CODES})


VOCABULARY_IDS = ["1,2,3", "0,0,0", "4,3,5"]


@pytest.mark.parametrize(
    ("write", "ids", "titles"),
    [
        (index_json, ["0", "1", "2"], ["Zelda", None, None]),
        (id2sid_json, ["B00", "B01", "B02"], None),
        (info_txt, ["0", "1", "2"], ['a "quoted one', "ünï\u2028code", "NULL"]),
        (pid2sid_parquet, [70, 5, 33], None),
        (catalogue_jsonl, ["sku-0", "sku-1", "sku-2"], ["2026-01-01", None, None]),
        (sid_vocabulary, VOCABULARY_IDS, None),
        (sid_vocabulary_with_end, [f"{i},1" for i in VOCABULARY_IDS], None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_layout_gives_the_ids_codes_and_titles_that_are_in_it(tmp_path, write, ids, titles):
    (path,) = list_catalog(str(write(tmp_path)))
    table = read_file(path, SPACE, bound_space)
    assert table.column("item_id").to_pylist() == ids
    found = read_codes(table.column("sid").combine_chunks(), pa.array(ids), SPACE)
    assert found.tolist() == CODES
    assert ("title" in table.column_names) == (titles is not None)
    if titles is not None:
        assert table.column("title").to_pylist() == titles
    described, schema = describe_catalog(path, SPACE, bound_space)
    assert (described.rows, described.bytes) == (3, Path(path).stat().st_size)
    assert schema.field("item_id").type == pa.array(ids).type
    catalog = read_catalog([path], SPACE, bound_space)
    assert catalog.item_ids.to_pylist() == sorted(ids)
    assert catalog.trie.num_sids == 3


def test_the_end_token_is_told_from_a_last_level_by_the_space(tmp_path):
    table = read_file(str(sid_vocabulary_with_end(tmp_path)), sid_space((5, 4, 6, 2)))
    assert table.column("sid").to_pylist() == [[*codes, 1] for codes in CODES]


# --- arrays ---------------------------------------------------------------------------------------


def codes_table(path: Path) -> pa.Table:
    (found,) = list_catalog(str(path))
    return read_file(found, SPACE)


def many_codes() -> np.ndarray:
    return random_codes(np.random.default_rng(0), 20, ragged=True)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
@pytest.mark.parametrize("flipped", [False, True], ids=["N by L", "H by N"])
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_an_array_of_codes_is_read_either_way_round(tmp_path, suffix, flipped, dtype):
    codes = many_codes().astype(dtype)
    stored = np.ascontiguousarray(codes.T) if flipped else codes
    path = tmp_path / f"codes{suffix}"
    if suffix == ".npy":
        np.save(path, stored)
    else:
        other = np.zeros((20, 8), dtype=np.float32)
        save_file({"codes": stored, "embedding": other}, path, metadata={"made": "here"})
    table = codes_table(path)
    assert table.column("item_id").to_pylist() == list(range(20))
    assert table.schema.field("item_id").type == pa.int64()
    found = read_codes(table.column("sid").combine_chunks(), pa.array(range(20)), SPACE)
    np.testing.assert_array_equal(found, codes)


def test_unsigned_and_transposed_arrays_are_read_as_they_are(tmp_path):
    codes = random_codes(np.random.default_rng(1), 30).astype(np.uint16)
    np.save(tmp_path / "codes.npy", np.asfortranarray(codes))
    assert codes_table(tmp_path / "codes.npy").column("sid").to_pylist() == codes.tolist()


def test_a_hole_inside_an_array_row_is_not_taken_for_its_end(tmp_path):
    codes = np.zeros((20, 3), dtype=np.int32)
    codes[7] = [1, -1, 2]
    np.save(tmp_path / "codes.npy", codes)
    with pytest.raises(CatalogError, match="outside its codebook.*got -1 for item 7"):
        read_catalog([str(tmp_path / "codes.npy")], SPACE)


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.zeros((3, 16), int), r"int64 \[3, 16\]"),  # two items of 16 levels, or 16 items?
        (np.zeros((20, 20), int), r"int64 \[20, 20\]"),
        (np.zeros(20, int), r"int64 \[20\]"),
        (np.zeros((2, 20, 3), int), r"int64 \[2, 20, 3\]"),
        (np.zeros((20, 3)), r"float64 \[20, 3\]"),
    ],
)
def test_an_array_that_is_not_plainly_codes_is_refused(tmp_path, array, got):
    np.save(tmp_path / "codes.npy", array)
    with pytest.raises(TableError, match=f"cannot be read as codes.*{got}.*as Parquet"):
        codes_table(tmp_path / "codes.npy")


def test_a_tensor_file_must_hold_one_matrix_of_integers(tmp_path):
    codes = many_codes()
    save_file({"a": codes, "b": codes}, tmp_path / "two.safetensors")
    with pytest.raises(TableError, match="exactly one integer tensor.*'b': 'I32"):
        codes_table(tmp_path / "two.safetensors")
    for name, data in (("short", b"x"), ("text", b"{}" * 20), ("list", b"\2" + bytes(7) + b"[]")):
        (tmp_path / f"{name}.safetensors").write_bytes(data)
        with pytest.raises(TableError, match="cannot be read as its name promises"):
            codes_table(tmp_path / f"{name}.safetensors")


def test_a_pickle_is_refused_and_never_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "opened",))

    torch.save(torch.zeros(3, 20, dtype=torch.int64), tmp_path / "sids.pt")
    (tmp_path / "sids.pkl").write_bytes(pickle.dumps(Trap()))
    np.save(tmp_path / "sids.npy", np.asarray([Trap()], dtype=object), allow_pickle=True)
    for name in ("sids.pt", "sids.pkl"):
        with pytest.raises(TableError, match="pickled files are not read.*safetensors"):
            list_catalog(str(tmp_path / name))
    with pytest.raises(TableError, match="allow_pickle=False"):
        codes_table(tmp_path / "sids.npy")
    assert not (tmp_path / "opened").exists()


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("x.index.json", '{"0": ["<a_1>"', "as its name promises: got Expecting"),
        ("x.index.json", "{}", "no layout we know.*an empty object"),
        ("x.index.json", "[1, 2]", "no layout we know.*got list"),
        ("x.index.json", '{"0": ["<a_1>"], "1": 5}', "as its name promises"),
        ("x.inter.json", '{"0": {"title": "a"}}', "no layout we know"),
        ("sid2pid.json", '{"123": [{"pid": 1}]}', "no layout we know.*got {'123': "),
        ("v.json", '{"1,2,x": 1}', "as its name promises.*'?x"),
        ("i.txt", "<a_1><b_2>\ttitle\t0\n<a_1>\t1\n", "Expected 3 columns, got 2"),
        ("i.txt", "", "as its name promises"),
        ("c.jsonl", '{"item_id": 1, "token_ids": [20]}\n{"item_id"\n', "not JSON.*line 2"),
        ("c.jsonl", '{"item": 1, "token_ids": [20]}\n', "no item_id and token_ids.*line 1"),
("c.jsonl", '{"item_id": 1, "token_ids": ["a"]}\n', "no item_id and token_ids.*line 1"),
        ("c.jsonl", '{"item_id": 1, "token_ids": 20}\n', "no item_id and token_ids.*line 1"),
        ("c.jsonl", '{"item_id": 1, "token_ids": [20]}\n{"item_id": "1", "token_ids": [20]}\n',
         "item_id changes its type.*int, as 1 before.*str '1'.*line 2"),
        ("c.jsonl", '{"item_id": 1.5, "token_ids": [20]}\n', "a whole number.*1.5.*line 1"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path, name, text, match):
    (tmp_path / name).write_text(text)
    with pytest.raises(TableError, match=match):
        read_catalog(list_catalog(str(tmp_path / name)), SPACE, bound_space)


def test_text_that_is_not_utf8_is_refused(tmp_path):
    for name in ("x.json", "x.txt", "x.jsonl"):
        (tmp_path / name).write_bytes(b"\xff\xfe<a_1>\tx\t\xe9\n")
        with pytest.raises(TableError):
            read_file(str(tmp_path / name), SPACE, bound_space)


def test_an_item_that_stands_twice_in_a_json_is_not_lost(tmp_path):
    (tmp_path / "x.json").write_text('{"7": ["<a_1>"], "7": ["<a_2>"]}')
    with pytest.raises(CatalogError, match="stands more than once.*'7'"):
        read_catalog([str(tmp_path / "x.json")], SPACE)


@pytest.mark.parametrize(
    ("ids", "match"),
    [([20, 25, 999], "got 'token id 999'"), ([20, 29, 25], "a token like <b_0> at level 2")],
)
def test_a_token_id_outside_its_level_is_named(tmp_path, ids, match):
    (tmp_path / "c.jsonl").write_text(json.dumps({"item_id": 1, "token_ids": ids}))
    with pytest.raises(CatalogError, match=match):
        read_catalog([str(tmp_path / "c.jsonl")], SPACE, bound_space)


def test_token_ids_need_the_tokenizer(tmp_path):
    with pytest.raises(CatalogError, match="cannot be read without the tokenizer"):
        read_catalog([str(catalogue_jsonl(tmp_path))], SPACE)


def test_paths_without_a_catalog_are_refused(tmp_path):
    (tmp_path / "catalog.csv").write_text("item_id,sid\n")
    with pytest.raises(TableError, match="layout is not known.*json.*got 'catalog.csv'"):
        list_catalog(str(tmp_path / "catalog.csv"))
    for name in ("no.parquet", "no.index.json", "*.jsonl"):
        with pytest.raises(TableError, match="catalog: nothing is at the path|no Parquet file"):
            list_catalog(str(tmp_path / name))
    with pytest.raises(StorageError, match="cannot be read"):
        read_file(str(tmp_path / "no.npy"), SPACE)


def test_a_glob_takes_all_its_files_but_not_the_titles(tmp_path):
    index_json(tmp_path)
    found = list_catalog(str(tmp_path / "*.i*.json"))
    assert [Path(p).name for p in found] == ["Games.index.json", "Games.inter.json"]
    lines = catalogue_jsonl(tmp_path).read_text().splitlines()
    for i, line in enumerate(lines[:3]):
        (tmp_path / f"part-{i}.jsonl").write_text(line.replace("2026-01-01", "T"))
    parts = list_catalog(str(tmp_path / "part-*.jsonl"))
    tables = [read_file(p, SPACE, bound_space) for p in parts]
    assert [t.column("item_id").to_pylist() for t in tables] == [["sku-0"], ["sku-1"], ["sku-2"]]


def test_files_in_a_store_are_read_as_those_on_disk(tmp_path):
    import fsspec

    fs = fsspec.filesystem("memory")
    for path in (index_json(tmp_path), tmp_path / "Games.item.json"):
        fs.pipe_file(f"/readers/{path.name}", path.read_bytes())
    (path,) = list_catalog("memory://readers/Games.index.json")
    table = read_file(path, SPACE)
    assert table.equals(read_file(str(tmp_path / "Games.index.json"), SPACE))


@pytest.mark.parametrize("text", ["", "x<a_1>", "<a_1>x", "<a_1", "<a_1><d_0>", "<a_x>"])
def test_split_texts_and_its_twin_agree_on_what_is_not_a_semantic_id(text):
    assert split_texts(pa.array([text, "<a_1><b_0>"]), SPACE)[1].tolist() == [False, True]
    if text:
        with pytest.raises(CatalogError):
            SPACE.split(text)


def test_split_texts_and_its_twin_agree_on_tokens():
    texts = ["<a_1><b_2><c_3>", " <a_0> <b_3>\t<c_10>", "<c_1><a_1>", "<a_4>"]
    tokens, whole = split_texts(pa.array(texts), SPACE)
    assert whole.all()
    assert tokens.to_pylist() == [SPACE.split(text) for text in texts]


# --- a run ----------------------------------------------------------------------------------------


def as_index_json(folder: Path, catalog: pa.Table) -> list[str]:
    """The catalog as `C.index.json`; returns its item ids."""
    ids = [str(i) for i in catalog.column("item_id").to_pylist()]
    sids = catalog.column("sid").to_pylist()
    tokens = [[SPACE.token(lv, c) for lv, c in enumerate(sid)] for sid in sids]
    dump(folder / "C.index.json", dict(zip(ids, tokens, strict=True)))
    return ids


def test_a_plan_lists_and_hashes_a_catalog_of_any_layout(tmp_path):
    tables = write_inputs(tmp_path, num_items=20)
    ids = as_index_json(tmp_path, tables["catalog"])
    config = load_config(write_config(tmp_path, inputs__catalog="C.index.json"))
    plain = plan_run(config)
    assert plain.inputs["catalog"].rows == 20
    assert plain.item_id_type == "string"
    assert set(plain.inputs["catalog"].columns) == {"item_id", "sid"}
    assert plan_run(config).run_id == plain.run_id
    titles = dump(tmp_path / "C.item.json", {ids[0]: {"title": "T"}})
    titled = plan_run(config)
    assert titled.run_id != plain.run_id
    dump(titles, {ids[0]: {"title": "Another"}})
    assert plan_run(config).run_id != titled.run_id


def test_a_run_reads_the_layout_and_recommends_the_same(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    config = write_config(tmp_path)
    nightshelf("run", config)
    part = "out/ds=2026-11-28/surface=home"
    want = pq.read_table(tmp_path / part, partitioning=None).drop_columns("run_id")
    ids = as_index_json(tmp_path, tables["catalog"])
    dump(tmp_path / "C.item.json", {i: {"title": f"Title {i}"} for i in ids})
    nightshelf("run", config, "--set", "inputs.catalog=C.index.json")
    found = pq.read_table(tmp_path / part, partitioning=None).drop_columns("run_id")
    order = [("user_id", "ascending"), ("rank", "ascending")]
    assert found.sort_by(order).equals(want.sort_by(order))
    user = found.column("user_id")[0].as_py()
    args = ("--user", user, "--set", "inputs.catalog=C.index.json")
    assert "Title i0" in nightshelf("show", config, *args).out


def test_ids_of_another_type_than_the_catalog_s_are_refused_before_anything_runs(
    nightshelf, tmp_path
):
    tables = write_inputs(tmp_path, int_ids=True)
    as_index_json(tmp_path, tables["catalog"])
    done = nightshelf("plan", write_config(tmp_path, inputs__catalog="C.index.json"), check=3)
    assert "have another type than in catalog" in done.err

"""Every file below a path that is named is read, or named in an error; none is left out."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import fsspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.catalog.readers import list_catalog, read_file
from pipelines.sources import input_files
from schemas.errors import TableError
from tests.factories import sid_space, write_config, write_inputs

NAMES = ("a.parquet", "000000_0", "b.PARQUET", "c.parq", "d.snappy.parquet", "part-r-00000", "e.gz")
PLACES = ("local", "memory")


def content(*users):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"user_id": list(users)}), sink)
    return sink.getvalue().to_pybytes()


class Place:
    """A folder on a disk or in a store, and what users are in a path of it."""

    def __init__(self, kind, tmp_path):
        self.fs = fsspec.filesystem("file" if kind == "local" else "memory")
        self.inside = str(tmp_path) if kind == "local" else f"/{tmp_path.name}"
        self.base = self.inside if kind == "local" else f"memory:/{self.inside}"

    def write(self, name, data):
        path = f"{self.inside}/{name}"
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(path, data)

    def users(self, path):
        found = input_files.list_parquet(f"{self.base}/{path}", "users")
        tables = []
        for one in found:
            input_files.describe_file(one, "users")
            tables.append(input_files.read_head(one, 1000, ["user_id"]))
        return sorted(pa.concat_tables(tables).column("user_id").to_pylist())


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    made = Place(request.param, tmp_path)
    yield made
    if request.param == "memory" and made.fs.exists(made.inside):
        made.fs.rm(made.inside, recursive=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", ["users", "users/deep/er", "users/_day=1", "users/it's [odd]*"])
def test_a_file_of_any_name_is_read(place, name, folder):
    place.write("users/_day=1/0.parquet" if "=" in folder else "users/0.parquet", content("u0"))
    place.write(f"{folder}/{name}", content("u1"))
    assert place.users("users") == (["u0", "u1"] if name != "0.parquet" else ["u0"])
    assert place.users(f"{folder}/{name}") == ["u1"]


@pytest.mark.parametrize(
    "name", ["_SUCCESS", ".part.crc", "_temporary/0/x.parquet", ".staging/x.parquet",
             "x.parquet._COPYING_", "_metadata", ".ds=1/x.parquet"]
)  # fmt: skip
def test_hidden_names_are_no_rows(place, name):
    place.write("users/0.parquet", content("u0"))
    place.write(f"users/{name}", b"" if "parquet" not in name else content("u1"))
    assert place.users("users") == ["u0"]


def test_a_hidden_file_that_is_named_is_read(place):
    place.write("users/_late/.x.parquet", content("u1"))
    assert place.users("users/_late/.x.parquet") == ["u1"]
    assert place.users("users/_la*/.x*") == ["u1"]


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "empty"), (b"user_id\nu1\n", "not Parquet"), (b"PAR", "not Parquet"),
     (b"PAR1 cut", "cannot be read as Parquet"), (b"\x1f\x8b" + b"x" * 50, "not Parquet")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["README.md", "users.csv", "part-1.crc", "x.parquet", "0_0"])
def test_a_file_that_is_no_parquet_is_named(place, name, data, words):
    place.write("users/0.parquet", content("u0"))
    place.write(f"users/{name}", data)
    with pytest.raises(TableError) as caught:
        place.users("users")
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_folders_that_a_glob_matches_are_read_whole(place):
    for day in (1, 2):
        for name in ("0.parquet", "more/1"):
            place.write(f"users/{day}.parquet/{name}", content(f"u{day}{name[-1]}"))
    place.write("users/3.parquet", content("u3"))
    every = sorted(["u1t", "u11", "u2t", "u21", "u3"])
    assert place.users("users/*.parquet") == every
    assert place.users("users/**") == every
    assert place.users("users/**/*.parquet") == every
    assert place.users("us*/?.parquet/more") == ["u11", "u21"]
    assert place.users("users/[12].parquet/0.*") == ["u1t", "u2t"]


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?b", "x::y", "[a-c]", "memory::x", "**"])
def test_a_name_that_is_there_is_no_pattern(place, name):
    if "::" in name and not place.base.startswith("/"):
        pytest.skip("fsspec's memory takes :: for a chain itself")
    place.write(f"{name}/0.parquet", content("u0"))
    for other in ("a1", "ab", "axb", "a", "b"):
        place.write(f"{other}/0.parquet", content("other"))
    assert place.users(name) == ["u0"]
    assert place.users(f"{name}/*.parquet") == ["u0"]
    assert place.users(f"{name}/0.parquet") == ["u0"]


@pytest.mark.parametrize("path", ["users", "users/*.parquet", "no[w]here", "users/0.parquet"])
def test_where_nothing_is_that_is_said(place, path):
    place.write("else/0.parquet", content("u0"))
    with pytest.raises(TableError, match="users: (nothing|no Parquet file) is at the path"):
        place.users(path)


def test_folders_must_name_the_same_columns(place):
    place.write("users/country=se/0.parquet", content("u0"))
    place.write("users/country=no/0.parquet", content("u1"))
    assert place.users("users") == ["u0", "u1"]
    place.write("users/0.parquet", content("u2"))
    with pytest.raises(TableError, match=r"name different columns: expected no column.*country="):
        place.users("users")
    assert place.users("users/country=*") == ["u0", "u1"]


def test_links_are_followed_and_end(tmp_path):
    place = Place("local", tmp_path)
    place.write("users/0.parquet", content("u0"))
    place.write("elsewhere/deep/1.parquet", content("u1"))
    place.write("one/2.bin", content("u2"))
    (tmp_path / "users/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "users/2.parquet").symlink_to(tmp_path / "one/2.bin")
    (tmp_path / "users/loop").symlink_to(tmp_path / "users")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "elsewhere")
    every = ["u0", "u1", "u2"]
    assert place.users("users") == every
    assert place.users("users/**") == every
    (tmp_path / "all").symlink_to(tmp_path / "users")
    assert place.users("all") == every
    (tmp_path / "users/twice").symlink_to(tmp_path / "elsewhere/deep")
    with pytest.raises(TableError, match="two names"):
        place.users("users")


@pytest.mark.parametrize("what", ["dangling", "pipe"])
def test_what_cannot_be_read_is_named(tmp_path, what):
    place = Place("local", tmp_path)
    place.write("users/0.parquet", content("u0"))
    if what == "pipe":
        os.mkfifo(tmp_path / "users/1.parquet")
    else:
        (tmp_path / "users/1.parquet").symlink_to(tmp_path / "gone")
    for path in ("users", "users/1.parquet", "users/*.parquet"):
        with pytest.raises(TableError, match=r"1\.parquet"):
            place.users(path)


def test_marks_of_folders_in_a_store_are_no_files():
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/marks/day_$folder$", b"")
    fs.pipe_file("/marks/day/0.parquet", content("u0"))
    for path in ("marks", "marks/*", "marks/d*"):
        assert len(input_files.list_parquet(f"memory://{path}", "users")) == 1


@pytest.mark.parametrize("log", ["_delta_log/0.json", ".hoodie/hoodie.properties"])
@pytest.mark.parametrize("path", ["in/t*", "in/*", "in", "in/table/part=1/*", "in/*/part=1"])
def test_a_table_with_a_log_is_never_read_by_its_files(place, log, path):
    place.write("in/table/part=1/0.parquet", content("u0"))
    place.write(f"in/table/{log}", b"{}")
    with pytest.raises(TableError, match="users: .*table"):
        place.users(path)


@pytest.mark.parametrize("target", ["table/0.parquet", "table/day=1", "table/day=1/0.parquet"])
@pytest.mark.parametrize("link", ["in/0", "in/deep/0"])
@pytest.mark.parametrize("path", ["in", "in/*", "in/**", "{link}", "in/[!x]*"])
def test_a_link_into_a_table_with_a_log_is_refused(tmp_path, target, link, path):
    place = Place("local", tmp_path)
    place.write("table/0.parquet", content("u0"))
    place.write("table/day=1/0.parquet", content("u1"))
    place.write("table/_delta_log/0.json", b"{}")
    (tmp_path / link).parent.mkdir(parents=True)
    (tmp_path / link).symlink_to(tmp_path / target)
    with pytest.raises(TableError, match="users: the path leads to files of a Delta table"):
        place.users(path.format(link=link))


def test_a_run_reads_every_file_of_every_table(nightshelf, tmp_path):
    """The rows are those of the same tables in one file each."""
    tables = write_inputs(tmp_path, num_users=20)
    config = write_config(tmp_path, run__workers=0)
    nightshelf("run", config)
    want = rows(tmp_path / "out")
    for name, table in tables.items():
        folder = tmp_path / f"{name}-many"
        (folder / "sub/dir").mkdir(parents=True)
        step = -(-len(table) // 3)
        for at, file in enumerate(("000000_0", "sub/1.PARQ", "sub/dir/part-2.snappy.parquet")):
            pq.write_table(table.slice(at * step, step), folder / file)
        (folder / "_SUCCESS").touch()
    paths = {f"inputs__{name}": f"{name}-many" for name in tables}
    nightshelf("run", write_config(tmp_path, run__workers=0, output__path="out2", **paths))
    assert rows(tmp_path / "out2").equals(want)


def rows(folder: Path):
    frame = pl.read_parquet(folder / "**/*.parquet", hive_partitioning=False)
    return frame.drop("run_id", strict=False).sort("user_id", "rank")


# --- catalogs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w[1]", "w*", "w?", "%20w", "w{a}", "w #"])
def test_a_work_folder_may_be_called_anything(nightshelf, tmp_path, monkeypatch, name):
    write_inputs(tmp_path, num_users=12)
    config = write_config(tmp_path, run__work_dir=name)
    nightshelf("run", config)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    truth = tmp_path / "exclusions.parquet"
    scored = nightshelf("evaluate", config, "--truth", truth, "--output", "json").json
    assert scored["users"]["with_list"] == 12


def test_an_item_may_be_called_anything(tmp_path):
    """The layout of a JSON catalog is told by its values."""
    space = sid_space()
    for keys in (["0,0,5", "1"], ["B0,1"], [",", "a,b"], ["1,2,3", "4,5,6"], ["7"]):
        path = tmp_path / "x.index.json"
        path.write_text(json.dumps({key: ["<a_3>", "<b_0>", "<c_1>"] for key in keys}))
        table = read_file(str(path), space)
        assert table.column("item_id").to_pylist() == keys
        assert table.column("sid").to_pylist() == [["<a_3>", "<b_0>", "<c_1>"]] * len(keys)
        path.write_text(json.dumps(dict.fromkeys(keys, "<a_3><b_0><c_1>")))
        assert read_file(str(path), space).column("item_id").to_pylist() == keys
    path.write_text(json.dumps({"1,2,3": 1, "1,2,4": 7}))
    assert read_file(str(path), space).column("sid").to_pylist() == [[1, 2, 3], [1, 2, 4]]
    for mixed in ({"1,2,3": 1, "1,2,4": ["<a_1>"]}, {"1": 1, "x": None}, {"1,2": {"a": 1}}):
        path.write_text(json.dumps(mixed))
        with pytest.raises(TableError):
            read_file(str(path), space)


def test_catalog_files_are_read_or_named(tmp_path):
    table = pa.table({"item_id": ["a"], "sid": [[1, 2, 3]]})
    for name in ("000000_0", "b.parq", "c.PARQUET"):
        pq.write_table(table, tmp_path / name)
    assert len(list_catalog(str(tmp_path))) == 3
    assert list_catalog(str(tmp_path / "b.parq")) == [str(tmp_path / "b.parq")]
    (tmp_path / "more.jsonl").write_text("{}")
    with pytest.raises(TableError, match=r"another layout.*more\.jsonl"):
        list_catalog(str(tmp_path))
    with pytest.raises(TableError, match=r"another layout.*000000_0"):
        (tmp_path / "x.jsonl").mkdir()
        pq.write_table(table, tmp_path / "x.jsonl" / "000000_0")
        list_catalog(str(tmp_path / "*.jsonl"))

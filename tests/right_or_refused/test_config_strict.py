"""A configuration says one thing, and every error names the setting and its line."""

from __future__ import annotations

import math
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from schemas.config_file import load_config
from schemas.errors import ConfigError
from schemas.overrides import kinds_of
from schemas.settings import RunConfig
from schemas.strict_yaml import read_yaml
from tests.factories import write_config, write_inputs

BASE = """\
surface: home
ds: 2026-11-28
engine: {backend: fake}
sid:
  sizes: [5, 4, 6]
  tokens: ["<a_{code}>", "<b_{code}>", "<c_{code}>"]
prompt:
  template: "Hi {history}"
inputs:
  users: users.parquet
  catalog: catalog.parquet
task:
  k: 5
  generate: {width: 8}
output:
  path: out
"""


def write(folder, text):
    path = folder / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refused(folder, text, **more) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), **more)
    assert len(str(caught.value)) < 2000
    return caught.value


def test_the_base_is_right(tmp_path):
    config = load_config(write(tmp_path, BASE))
    assert (config.ds, config.task.k) == ("2026-11-28", 5)


# What is written behind BASE (16 lines), the words of the error, and its line.
WRONG = {
    "a section twice": ("audit:\n  min_rows: 3\naudit:\n  warn: []\n", "audit: the key stands", 19),
    "a key twice": ("audit:\n  min_rows: 3\n  min_rows: 4\n", "audit.min_rows: the key stands", 19),
    "twice in flow": ("audit: {min_rows: 1, min_rows: 2}\n", "audit.min_rows: the key stands", 17),
    "twice, quoted": ("audit: {min_rows: 1, 'min_rows': 2}\n", "lines 17 and 17", 17),
    "a merge": ("audit: {<<: {min_rows: 1}}\n", "the merge key", 17),
    "a merge of an alias": ("audit: &a {min_rows: 1}\nreport: {<<: *a}\n", "the merge key", 18),
    "a number as key": ("audit: {1: 2}\n", "'1', which YAML reads as 1", 17),
    "null as key": ("audit: {null: 2}\n", "reads as None", 17),
    "a boolean as key": ("on: {}\n", "reads as True", 17),
    "a list as key": ("? [a, b]\n: 1\n", "a list or a mapping as a key", 17),
    "two documents": ("---\nsurface: mail\n", "a second document", 17),
    "a sexagesimal": ("audit:\n  min_rows: 22:30\n", "audit.min_rows: cannot be used", 18),
    "an octal": ("audit:\n  min_rows: 010\n", "octal", 18),
    "a giant": ("audit:\n  min_rows: " + "9" * 5000 + "\n", "a number of 5,000 characters", 18),
    "infinite": ("audit:\n  max_row_change: .inf\n", "audit.max_row_change", 18),
    "not a number": ("audit:\n  max_row_change: .nan\n", "audit.max_row_change", 18),
    "overflowing": ("audit:\n  max_row_change: 1e999\n", "audit.max_row_change", 18),
    "a tag": ("audit: !!python/object:os.system {}\n", "the tag", 17),
    "an own tag": ("audit:\n  min_rows: !three 3\n", "the tag", 18),
    "deep": ("audit: " + "[" * 2000 + "]" * 2000 + "\n", "values too deep", 17),
    "deep in blocks": ("".join("  " * n + "a:\n" for n in range(200)), "values too deep", 49),
    "a circle": ("audit: &a {warn: [*a]}\n", "*a inside what it names", 17),
    "no anchor": ("audit: *gates\n", "*gates", 17),
    "a tab": ("audit:\n\tmin_rows: 3\n", "'\\t'", 18),
    "NUL": ('run:\n  work_dir: "a\\0b"\n', "run.work_dir: cannot be used: expected text", 18),
    "a surrogate": ('run:\n  work_dir: "a\\ud800"\n', "U+D800", 18),
    "beyond Unicode": ('run:\n  work_dir: "\\UFFFFFFFF"\n', "cannot be read", 18),
    "a line break": ('run:\n  work_dir: "a\\nb"\n', "U+000A", 18),
    "an escape": ('run:\n  work_dir: "a\\e[31m"\n', "U+001B", 18),
    "a boolean as text": ("run:\n  work_dir: no\n", "put it in quotes, got False", 18),
    "a number as text": ("run:\n  work_dir: 12\n", "put it in quotes, got 12", 18),
    "a boolean as number": ("audit:\n  min_coverage: true\n", "audit.min_coverage", 18),
    "text as number": ('audit:\n  min_coverage: "0.5"\n', "audit.min_coverage", 18),
    "an unknown section": ("audits:\n  a: 1\n", "audits: unknown key", 17),
    "empty": ("run:\n  work_dir: ''\n", "run.work_dir", 18),
    "an unknown key": ("audit:\n  min_row: 3\n", "audit.min_row: unknown key", 18),
    "what does not fit": ("spark:\n  register_table: a.b\nreport: 3\n", "report", 19),
    "an open quote": ('audit: {warn: "a\n', "cannot be read", 18),
    "a union": ("run:\n  workers: many\n", "run.workers", 18),
    "a list's item": ("audit:\n  warn:\n  - overlap\n  - nothing\n", "audit.warn.1", 20),
    "a missing part": ("text:\n  column:\n", "text.column", 18),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_readers_take_in_two_ways_is_refused_with_its_line(tmp_path, nightshelf, name):
    more, words, line = WRONG[name]
    error = refused(tmp_path, BASE + more)
    assert words in str(error)
    assert error.where == f"{tmp_path / 'run.yaml'}:{line}"
    done = nightshelf("plan", tmp_path / "run.yaml", "--output", "json", check=2)
    assert done.json["error"]["exit_code"] == 2
    done = nightshelf("validate", tmp_path / "run.yaml", "--output", "json", check=None)
    assert [p for p in done.json["problems"] if p["line"] == line]


DAYS = ["2026-02-30", "'2026-02-30'", "2026-13-01", "2026-2-3", '"2026-11-28\\n"', "20261128",
        "2026-11-28 00:00:00", "０００１-01-01"]  # fmt: skip


@pytest.mark.parametrize("ds", DAYS)
def test_a_day_that_no_calendar_has_is_refused(tmp_path, ds):
    error = refused(tmp_path, BASE.replace("ds: 2026-11-28", f"ds: {ds}"))
    assert "ds: " in str(error)
    assert error.where == f"{tmp_path / 'run.yaml'}:2"


@pytest.mark.parametrize(
    ("data", "words", "line"),
    [
        (BASE.encode("utf-16"), "UTF-16", 1),
        (BASE.encode("utf-16-be"), "U+0000", 1),
        (BASE.encode() + b"# \xff\n", "the byte 0xff", 17),
        (BASE.encode() + b"# \x00\n", "U+0000", 17),
        (BASE.encode() + b"# \x07\n", "U+0007", 17),
        (b"#" * (1 << 21), "too long", None),
        (b"", "not a mapping", 1),
        (b"- a\n", "not a mapping", 1),
    ],
)
def test_bytes_that_are_no_configuration(tmp_path, data, words, line):
    error = refused(tmp_path, data)
    assert words in str(error)
    assert error.where == f"{tmp_path / 'run.yaml'}" + ("" if line is None else f":{line}")


@pytest.mark.parametrize(
    "text", ["\ufeff" + BASE, BASE.replace("\n", "\r\n"), "---\n" + BASE, BASE + "...\n"]
)
def test_ways_to_write_the_same(tmp_path, text):
    expected = load_config(write(tmp_path, BASE))
    assert load_config(write(tmp_path, text)) == expected


def test_aliases_are_copied_and_cannot_grow(tmp_path):
    found = read_yaml("a: &x {b: [1]}\nc: *x\nd: *x\n", "here").value
    assert found == {"a": {"b": [1]}, "c": {"b": [1]}, "d": {"b": [1]}}
    assert found["a"] is not found["c"]
    assert found["a"]["b"] is not found["c"]["b"]
    laughs = "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    assert "too many values" in str(refused(tmp_path, laughs))


def test_several_problems_each_with_its_line(tmp_path, nightshelf):
    error = refused(tmp_path, BASE + "audit:\n  min_rows: 0\n  min_rowz: 1\nrun:\n  workers: -1\n")
    path = tmp_path / "run.yaml"
    for line in (18, 19, 21):
        assert f"({path}:{line})" in str(error)
    report = nightshelf("validate", path, "--output", "json", check=None).json
    lines = {p["field"]: p["line"] for p in report["problems"]}
    assert lines.items() >= {"audit.min_rows": 18, "audit.min_rowz": 19, "run.workers": 21}.items()


def test_settings_that_do_not_fit_together_have_a_line(tmp_path):
    cases = {
        BASE + "audit: {warn: []}\nrun:\n  work_dir: runs/{ds}\n": 19,
        BASE.replace("Hi {history}", "Hi {history"): 8,
        BASE.replace("k: 5", "k: 5\n  eligibility: a b"): 14,
        BASE.replace("<b_{code}>", "<b>"): 6,
        BASE.replace("[5, 4, 6]", "[5, 4]"): 6,
        BASE.replace("width: 8", "width: [1]"): 14,
        BASE.replace("surface: home", "surface: ..").replace("path: out", "path: out/{surface}"): 1,
    }
    for text, line in cases.items():
        assert refused(tmp_path, text).where == f"{tmp_path / 'run.yaml'}:{line}"


# --- numbers ---------------------------------------------------------------------------------

WITHOUT_A_MOST = {"output.catalog"}  # properties of a pyiceberg catalog, passed on as text
LABELS = "task.label.labels"  # texts or ids; the plan says which of them are tokens


def numbers(model: type[BaseModel] = RunConfig, place: str = "") -> dict[str, Any]:
    """Every setting that may hold a number, and what it may be."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        for part in parts_of(kind):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= numbers(part, f"{place}{name}.")
            elif part in (int, float):
                found[place + name] = kind
    return found


def parts_of(kind: Any) -> list[Any]:
    if typing.get_origin(kind) is Literal:
        return []
    if typing.get_origin(kind) is Annotated:
        return parts_of(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType, tuple, list, dict):
        return [part for one in typing.get_args(kind) for part in parts_of(one)]
    return [kind]


def schema_numbers(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, dict):
        mine = [node] if node.get("type") in ("integer", "number") else []
        return mine + [one for value in node.values() for one in schema_numbers(value)]
    return (
        [one for value in node for one in schema_numbers(value)] if isinstance(node, list) else []
    )


def test_every_number_has_a_most():
    found = numbers()
    assert {"sid.sizes", "task.k", "run.shard_timeout_s", "audit.min_coverage"} <= found.keys()
    assert {"engine.trtllm.max_batch_size", "task.quota.max_items"} <= found.keys()
    for name, kind in found.items():
        if name in WITHOUT_A_MOST:
            continue
        for node in schema_numbers(TypeAdapter(kind).json_schema()):
            assert "maximum" in node or "enum" in node, name
            least = node.keys() & {"minimum", "exclusiveMinimum", "enum"}
            assert least or name == LABELS, name


@pytest.mark.parametrize(
    "value", [10**30, 2**63, -1, -0.5, math.nan, math.inf, -math.inf, "text", True, "3"]
)
def test_no_number_takes_what_is_none(value):
    for name, kind in numbers().items():
        adapter = TypeAdapter(kind)
        tries = [value, [value], [1, value]]
        if name in WITHOUT_A_MOST or (name == LABELS and value in ("text", "3", -1)):
            continue
        for one in tries:
            with pytest.raises((ValidationError, ConfigError)):
                if adapter.validate_python(one) is not None and math.isnan(float(value)):
                    raise ConfigError("sections refuse what is not finite")


@pytest.mark.parametrize("text", ["1" + "0" * 30, "-1", ".nan", ".inf", "text", "true", "1.5e300"])
def test_a_wrong_number_is_exit_2_and_named(tmp_path, nightshelf, text):
    write_inputs(tmp_path)
    path = write_config(tmp_path)
    for name in sorted(numbers().keys() - WITHOUT_A_MOST - {LABELS}):
        done = nightshelf("plan", path, "--set", f"{name}={text}", "--output", "json", check=2)
        assert name in done.json["error"]["message"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("sid.sizes", "[1e27, 4, 6]"), ("sid.sizes", "[1000000000000000000000000000, 4, 6]"),
     ("sid.sizes", "[4194304, 4194304, 6]"), ("task.generate.width", str(2**63)),
     ("task.quota", "{max_items: 100000000000000000000}"), ("task.k", "100001"),
     ("prompt.max_tokens", "1" + "0" * 23), ("run.shard_users", str(2**40))],
)  # fmt: skip
@pytest.mark.parametrize("command", ["plan", "validate"])
def test_what_would_size_memory_is_refused_before_it_is_allocated(
    tmp_path, nightshelf, command, setting, value
):
    write_inputs(tmp_path)
    path = write_config(tmp_path)
    done = nightshelf(command, path, "--set", f"{setting}={value}", "--output", "json", check=2)
    assert setting in done.out


def test_no_setting_reads_one_type_as_another(tmp_path):
    """A boolean is `true` or `false`; a number is no text."""
    flags = [name for name, kind in booleans().items()]
    assert {"task.generate.exact", "inputs.self_contained"} <= set(flags)
    for name in flags:
        for value in ("1", "'yes'", "0.0", "[]"):
            with pytest.raises(ConfigError, match=name):
                load_config(write(tmp_path, BASE), overrides=[f"{name}={value}"])


def booleans(model: type[BaseModel] = RunConfig, place: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        for part in parts_of(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= booleans(part, f"{place}{name}.")
            elif part is bool and place + name not in WITHOUT_A_MOST:
                found[place + name] = part
    return found


def test_the_bounds_are_documented():
    """docs/configuration.md has the range of each, in the row that names it."""
    docs = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    rows = [line.split("|")[1:4] for line in docs.partition("## Bounds")[2].splitlines()[6:]]
    for name in numbers().keys() - WITHOUT_A_MOST:
        ranges = {
            (
                f"{node.get('minimum', 0):g}" if "exclusiveMinimum" not in node else "above 0",
                f"{node['maximum']:,.0f}",
            )
            for node in schema_numbers(TypeAdapter(numbers()[name]).json_schema())
            if "maximum" in node
        }
        found = {(low.strip(), most.strip()) for low, most, who in rows if f"`{name}`" in who}
        assert ranges <= found, name


# --- --set -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "name", "expected"),
    [
        ("prompt.template={history}", "template", "{history}"),
        ("prompt.template=Hi: {history} # all", "template", "Hi: {history} # all"),
        ("prompt.template='{history}'", "template", "{history}"),
        ('prompt.template="a\\t{history}"', "template", "a\t{history}"),
        ("prompt.template= a ", "template", " a "),
        ("prompt.history_separator=", "history_separator", ""),
        ("prompt.history_separator=22:30", "history_separator", "22:30"),
        ("prompt.history_separator=null", "history_separator", "null"),
        ("prompt.null_text=null", "null_text", None),
        ("prompt.null_text='null'", "null_text", "null"),
        ("prompt.null_text=no", "null_text", "no"),
        ("prompt.max_tokens=12", "max_tokens", 12),
    ],
)
def test_set_reads_a_value_as_its_setting_asks(tmp_path, item, name, expected):
    config = load_config(write(tmp_path, BASE), overrides=[item])
    assert getattr(config.prompt, name) == expected


def test_set_of_other_kinds(tmp_path):
    path = write(tmp_path, BASE)
    config = load_config(path, overrides=["inputs.users={table: db.users}"])
    assert config.inputs.users == "table:db.users"
    assert load_config(path, overrides=["inputs.users={ds}/u"]).inputs.users == str(
        tmp_path / "2026-11-28/u"
    )
    assert load_config(path, overrides=["engine.trtllm.plugin=off"]).engine.trtllm.plugin == "off"
    assert load_config(path, overrides=["task.k=1", "task.k=2"]).task.k == 2
    assert load_config(path, overrides=["surface=NO"]).surface == "NO"
    assert load_config(path, overrides=["ds=2026-11-27"]).ds == "2026-11-27"
    assert load_config(path, overrides=["sid.sizes=[5, 4, 7]"]).sid.sizes == (5, 4, 7)
    assert kinds_of(("prompt", "template")) == {"string"}
    assert kinds_of(("no", "such")) == set()


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("task.kk=3", "task.kk: unknown key; did you mean 'k'?"),
        ("sid.sizes[0]=3", "a list is set as a whole"),
        ("task.k", "section.field=value"),
        ("=3", "section.field=value"),
        ("task..k=3", "section.field=value"),
        ("task.k.x=3", "'k' is not a section"),
        ("task.k=", "task.k"),
        ("task.k=null", "task.k"),
        ("task.k=[1", "--set task.k"),
        ("task={k: 1, k: 2}", "the value cannot be used"),
        ("audit={min_rows: 010}", "octal"),
        ("surface=", "surface"),
        ("surface=a\nb", "U+000A"),
        ("ds=2026-02-30", "ds"),
    ],
)
def test_a_wrong_set_names_the_argument(tmp_path, item, words):
    error = refused(tmp_path, BASE, overrides=[item])
    assert words in str(error)
    assert "--set" in str(error)
    assert ".yaml" not in (error.where or "")


def test_a_wrong_ds_names_the_argument(tmp_path):
    assert refused(tmp_path, BASE, ds="2026-02-30").where == "--ds"


# --- lines of what is found later -----------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "run", "prepare"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output__path", "users.parquet/below"),
        ("run__metrics_dir", "users.parquet"),
        ("output__path", "memory://x"),
    ],
)
def test_a_setting_that_does_not_fit_the_machine_has_its_line(
    nightshelf, tmp_path, command, key, value
):
    write_inputs(tmp_path)
    config, name = write_config(tmp_path, **{key: value}), key.replace("__", ".")
    keys = [row.strip().partition(":")[0] for row in config.read_text().splitlines()]
    line = 1 + keys.index(name.rpartition(".")[2])
    assert f"{config}:{line}" in nightshelf(command, config, check=2).err
    fine = write_config(tmp_path)
    value = value if "://" in value else str(tmp_path / value)
    said = nightshelf(command, fine, "--set", f"{name}={value}", check=2).err
    assert f"--set {name}" in said


def test_a_command_without_a_configuration_names_none(nightshelf, tmp_path):
    write_inputs(tmp_path)
    nightshelf("plan", write_config(tmp_path, output__path="memory://x"), check=2)
    err = nightshelf("compare", tmp_path / "a", tmp_path / "b", check=None).err
    assert "run.yaml" not in err

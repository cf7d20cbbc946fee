from __future__ import annotations

import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import errors
from schemas.config_file import load_config
from schemas.counts import Counts
from schemas.requests import Ragged, UserBatch
from schemas.semantic_ids import SidSpace
from schemas.settings import RunConfig, json_schema
from schemas.tables import candidate_shape, id_type
from schemas.templates import parse_template
from tests.factories import TOKENS, bound_space, sid_space, write_config

ROOT = errors.NightshelfError
ALL_ERRORS = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, ROOT)]


def test_an_error_reads_as_expected_got_where_and_what_to_do():
    error = errors.TableError(
        "users: column 'a' is missing", expected="a list", got="b", where="u.parquet", do="Add it."
    )
    assert str(error) == (
        "users: column 'a' is missing: expected a list, got b (u.parquet). Add it."
    )
    assert error.as_json()["exit_code"] == 3


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda e: e.__name__)
def test_errors_cross_process_borders_whole(kind):
    error = kind("w", expected="e", got="g", where="x", do="d")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)


def test_exit_codes_are_the_documented_ones():
    codes = {e.__name__: e.exit_code for e in ALL_ERRORS}
    assert codes == {
        "NightshelfError": 1, "ConfigError": 2, "InputError": 3, "TableError": 3,
        "CatalogError": 3, "RunError": 4, "ShardFailedError": 4, "AccountingError": 4,
        "StorageError": 4, "RecordError": 2, "ConflictError": 4, "AccessError": 2,
        "ChangedError": 4, "MissingFileError": 4, "DamagedFileError": 4, "EngineError": 5,
        "AuditRefusedError": 6, "WithdrawnError": 6, "ComparisonRefusedError": 6,
    }  # fmt: skip


@given(st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=8), st.randoms())
def test_ragged_lists_are_taken_and_filtered_as_lists_would_be(lists, random):
    ragged = Ragged.from_lists(lists)
    assert [ragged.row(r).tolist() for r in range(ragged.num_rows)] == lists
    rows = [random.randrange(len(lists)) for _ in range(5)] if lists else []
    taken = ragged.take(np.asarray(rows, dtype=np.int64))
    assert [taken.row(r).tolist() for r in range(taken.num_rows)] == [lists[r] for r in rows]
    odd = ragged.keep(ragged.values % 2 == 1)
    assert [odd.row(r).tolist() for r in range(odd.num_rows)] == [
        [v for v in one if v % 2] for one in lists
    ]


def test_a_batch_is_taken_row_by_row():
    users = UserBatch(
        num_users=3,
        vectors=np.arange(6, dtype=np.float32).reshape(3, 2),
        history=Ragged.from_lists([[1], [], [2, 3]]),
        texts={"bio": ["a", "b", "c"]},
    )
    part = users.take(np.asarray([2, 0]))
    assert part.vectors.tolist() == [[4, 5], [0, 1]]
    assert part.history.row(0).tolist() == [2, 3]
    assert part.texts == {"bio": ["c", "a"]}
    assert part.candidates is None


def test_tokens_and_codes_translate_both_ways():
    space = sid_space()
    assert space.token(1, 3) == "<b_3>"
    assert space.parse_token("<b_3>") == (1, 3)
    assert space.split("<a_1> <b_2><c_0>") == ["<a_1>", "<b_2>", "<c_0>"]
    bound = bound_space()
    assert bound.table[2, 5] == bound.token_ids[2][5] == bound.max_token_id
    assert bound.table[1, 4] == -1, "level 2 has four codes"


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: sid_space().parse_token("<d_0>"), "the SID space does not have"),
        (lambda: sid_space().split("<a_1>x"), "cannot be split"),
        (lambda: sid_space().bind(lambda t: None), "not in the tokenizer"),
        (lambda: sid_space().bind(lambda t: 7), "the same token id"),
    ],
)
def test_tokens_outside_the_space_are_refused(act, message):
    with pytest.raises(errors.CatalogError, match=message):
        act()


def test_a_pattern_may_not_name_two_levels():
    with pytest.raises(errors.ConfigError, match="same pattern for two levels"):
        SidSpace((2, 2), ("<a_{code}>", "<a_{code}>"))


def test_templates_are_cut_into_segments():
    template = parse_template("Hi {{you}} {user_vector}{history} in {segment}: {text:bio}")
    kinds = [(s.kind, s.text or s.column) for s in template.segments]
    assert kinds == [
        ("static", "Hi {you} "),
        ("user_vector", "embedding"),
        ("history", "history"),
        ("static", " in "),
        ("text", "segment"),
        ("static", ": "),
        ("text", "bio"),
    ]
    assert template.num_static == 1
    assert template.columns == ("segment", "bio")


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "{",
        "}",
        "{a b}",
        "{text:}",
        "{x:y}",
        "{history}{history}",
        "{text:history}",
        "{embedding}",
    ],
)
def test_templates_that_cannot_be_read_are_refused(bad):
    with pytest.raises(errors.ConfigError, match=r"prompt\.template"):
        parse_template(bad)


def test_paths_are_relative_to_the_file_and_take_date_and_surface(tmp_path):
    path = write_config(
        tmp_path, inputs__users="in/{ds}/{surface}/*.parquet", inputs__catalog="s3://b/{ds}/c"
    )
    config = load_config(path, ds="2026-01-02", overrides=["task.k=3", "surface=mail"])
    assert config.inputs.users == str(tmp_path / "in/2026-01-02/mail/*.parquet")
    assert config.inputs.catalog == "s3://b/2026-01-02/c"
    assert config.task.k == 3


def test_a_configuration_survives_its_own_json(tmp_path):
    config = load_config(write_config(tmp_path))
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_the_json_schema_names_every_section_and_refuses_unknown_keys():
    schema = json_schema()
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert schema["additionalProperties"] is False
    json.dumps(schema)


def test_every_setting_says_what_it_is():
    sections = {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if hasattr(field.annotation, "model_fields")
    }
    undocumented = [
        f"{section}.{name}"
        for section, model in sections.items()
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert not undocumented


@pytest.mark.parametrize(
    ("columns", "shape"),
    [
        ({"user_id": ["u"], "item_id": ["i"]}, "long"),
        ({"user_id": ["u"], "item_ids": [["i"]]}, "wide"),
        ({"segment": ["s"], "item_ids": [["i"]]}, "segment"),
        ({"item_id": ["i"], "note": ["x"]}, "shared"),
    ],
)
def test_the_shape_of_candidates_is_in_their_columns(columns, shape):
    assert candidate_shape(pa.table(columns).schema, "f") == shape


def test_candidates_of_no_known_shape_are_refused():
    with pytest.raises(errors.TableError, match="none of the known shapes"):
        candidate_shape(pa.table({"user": ["u"]}).schema, "f")


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (pa.string(), "string"),
        (pa.large_string(), "string"),
        (pa.dictionary(pa.int32(), pa.string()), "string"),
        (pa.int32(), "int64"),
        (pa.list_(pa.int64()), "int64"),
        (pa.large_list(pa.large_string()), "string"),
    ],
)
def test_ids_are_strings_or_int64(dtype, kind):
    assert id_type(dtype) == kind


def test_counts_add_up_and_say_what_does_not():
    good = Counts(users_in=3, users_recommended=2, users_quarantined=1, candidates_in=2,
                  candidates_scored=1, candidates_unknown=1)  # fmt: skip
    assert good.imbalances() == []
    total = Counts.total([good, good])
    assert total.users_in == 6
    assert total.imbalances() == []
    lost = total.model_copy(update={"users_recommended": 3, "candidates_scored": 9})
    assert len(lost.imbalances()) == 2
    assert TOKENS[0].startswith("<a_")

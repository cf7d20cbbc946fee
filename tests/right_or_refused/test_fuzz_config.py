"""Configurations, mutated: each is read as it is written, or refused in a sentence.

The draws are seeded: the same ones are tried each time. Of a text that is accepted, what was loaded
must be what a plain reading of the YAML says: no key is left out, replaced or reinterpreted.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.config_file import load_config
from schemas.errors import ConfigError
from tests.factories import write_config, write_inputs

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "configs").glob("*.yaml"))
TEXTS_A_SEED, SEEDS = 10, 32  # 320 of them; each seed goes through the command line too
DOCUMENTED = {0, 2, 3, 5, 6}
MARKS = "\"'{}[]:#&*!|>%@`\x07\u00a0,-"
ENDINGS = ("x", " ", "é", ".a", "\t")
ODD = [
    *(
        "1e999",
        "9" * 400,
        "-1",
        ".nan",
        "22:30",
        "010",
        "yes",
        "null",
        "~",
        "[]",
        "{}",
        "''",
        "0x10",
    ),
    *(
        "2026-02-30",
        "*x",
        "&x 1",
        "!!int 3",
        "1" + "0" * 30,
        "0.5",
        "true",
        "{ds}",
        '"a\\0"',
        "1_000",
    ),
    *(
        "\U0001f600",
        "[1, [2, [3]]]",
        "'1'",
        "'yes'",
        "- a",
        "a: b: c",
        "|",
        ">-",
        "\u200b",
        "\u2028",
    ),
]


def mutated(text: str, rng: random.Random) -> str:
    """One to three changes of a text, line by line."""
    lines = text.splitlines()
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        line = lines[at]
        key, colon, value = line.partition(":")
        match rng.randrange(9):
            case 0:
                lines.insert(rng.randrange(len(lines) + 1), line)
            case 1:
                lines[at] = " " * rng.choice((0, 1, 2, 4)) + line.lstrip()
            case 2 if colon:
                lines[at] = f"{key}: {rng.choice(ODD)}"
            case 3 if colon:
                lines[at] = f"{key}{rng.choice(ENDINGS)}:{value}"
            case 4:
                lines.pop(at)
            case 5 if colon:
                lines[at] = f"{key}: &a{value}" if rng.random() < 0.5 else f"{key}: *a"
            case 6:
                lines.insert(at, rng.choice(("---", "...", "<<: {a: 1}", "? a", "\t", "%YAML 1.1")))
            case 7:
                place = rng.randrange(len(line) + 1)
                lines[at] = line[:place] + rng.choice(MARKS) + line[place:]
            case _:
                lines[at], other = lines[rng.randrange(len(lines))], line
                lines.insert(rng.randrange(len(lines) + 1), other)
        lines = lines or ["{}"]
    return "\n".join(lines) + "\n"


class _Plain(yaml.SafeLoader):
    """The library's own reader, with dates as the text that is written."""


_Plain.add_constructor(
    "tag:yaml.org,2002:timestamp", lambda loader, node: loader.construct_scalar(node)
)


def says(written: Any, loaded: Any, place: str = "") -> list[str]:
    """Settings that are not what was written."""
    if isinstance(written, dict) and isinstance(loaded, dict):
        return [
            wrong
            for key, value in written.items()
            for wrong in says(value, loaded.get(key, "nothing"), f"{place}.{key}")
        ]
    if isinstance(written, list):
        same = isinstance(loaded, list) and len(written) == len(loaded)
        return [] if same and not any(map(says, written, loaded)) else [place]
    if isinstance(loaded, str) and isinstance(written, str):
        return [] if loaded.endswith(written.strip("./") or loaded) or "{" in written else [place]
    alike = type(written) is type(loaded) or {type(written), type(loaded)} == {int, float}
    if isinstance(written, str) and isinstance(loaded, float):  # 1e3: YAML 1.1 calls it a text
        return [] if float(written) == loaded else [place]
    return [] if alike and written == loaded else [place]


def bases(folder: Path) -> list[str]:
    own = write_config(folder).read_text()
    return [own, *(path.read_text() for path in EXAMPLES)]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_mutated_configuration_is_read_as_written_or_refused(nightshelf, tmp_path, seed):
    write_inputs(tmp_path, num_users=3, num_items=30)
    rng = random.Random(seed)
    texts = bases(tmp_path)
    path = tmp_path / "run.yaml"
    for number in range(TEXTS_A_SEED):
        text = mutated(texts[(seed + number) % len(texts)], rng)
        path.write_bytes(text.encode())
        try:
            loaded = load_config(path).model_dump(mode="json")
        except ConfigError as err:
            assert str(path) in (err.where or ""), text
            assert (err.where or "").rpartition(":")[2].isdigit() or "problems" in str(err), text
        else:
            wrong = says(yaml.load(text, _Plain), loaded)
            assert not [w for w in wrong if not w.startswith(".inputs.")], text
        if number == 0:
            path.write_bytes(mutated(texts[0], rng).encode())
            for command in ("validate", "plan"):
                done = nightshelf(command, path, "--output", "json", check=None)
                assert done.code in DOCUMENTED, (done.err, path.read_text())
                assert isinstance(done.json, dict)


def test_there_are_examples():
    assert len(EXAMPLES) >= 3
    assert TEXTS_A_SEED * SEEDS >= 300


def test_a_reading_that_differs_is_seen():
    assert says({"a": {"b": 1}}, {"a": {"b": 2}}) == [".a.b"]
    assert says({"a": 1}, {}) == [".a"]
    assert says({"a": True}, {"a": 1}) == [".a"]
    assert says({"a": [1, 2]}, {"a": [1]}) == [".a"]
    assert says(json.loads('{"a": {"b": 1}, "c": "x"}'), {"a": {"b": 1, "d": 2}, "c": "x"}) == []

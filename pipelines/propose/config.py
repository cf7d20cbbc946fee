"""A commented configuration from what was found: plain text, so that people can go on from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from engine.prompts.projector_spec import ProjectorSpec
from engine.prompts.sid_vocabulary import Vocabulary
from pipelines.propose.sids import SidGuess
from pipelines.propose.tables import UsersGuess
from schemas.tables import CandidateShape

_MOST_HISTORY = 50
_ROUND = 64
_MARGIN = 16  # tokens of text that people add to the template
_TEXT_PROMPT = 1024
_WRAP = 96


Place = str | dict[str, str]  # a path, or {delta: path}


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything that was found; paths are as they go into the file."""

    surface: str
    ds: str
    users_path: Place
    catalog_path: Place
    candidates_path: Place | None
    exclusions_path: Place | None
    model_path: str | None
    projector_path: str | None
    users: UsersGuess
    sids: SidGuess | None
    text_column: str | None
    num_items: int
    has_popularity: bool
    shape: CandidateShape | None
    vocabulary: Vocabulary | None
    model: dict[str, object]  # config.json
    projector: ProjectorSpec | None
    text_tokens: int  # of the longest item text
    attributes: tuple[str, ...]
    days: tuple[str, ...]  # tables that have a part for each day


def config_text(found: Found) -> str:
    """The YAML file."""
    sections = (
        _head(found),
        _engine(found),
        _items(found),
        _prompt(found),
        _inputs(found),
        _task(found),
        _rest(found),
    )
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _say(text: str, indent: int = 2) -> Iterator[str]:
    """A comment, wrapped."""
    line = " " * indent + "#"
    for word in text.split():
        if len(line) + 1 + len(word) > _WRAP:
            yield line
            line = " " * indent + "#"
        line += f" {word}"
    yield line


def _value(value: object) -> str:
    """A value as YAML: JSON is, except that plain words read better without quotes."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./={}-]*")
_NOT_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


def _head(found: Found) -> Iterator[str]:
    yield from _say(
        "Written by nightshelf init from what the tables hold. What it guessed, it says; "
        "docs/configuration.md has every setting.",
        0,
    )
    yield f"surface: {_value(found.surface)}    # where the items are shown; partitions the output"
    yield f"ds: {_value(found.ds)}    # partition date; a nightly job passes --ds instead"


def _engine(found: Found) -> Iterator[str]:
    yield "engine:"
    if found.model_path is None:
        yield from _say(
            "No --model was given: `fake` invents scores from a hash, so that tables and settings "
            "can be tried without one. With a model: backend: torch, model: its folder."
        )
        yield "  backend: fake"
        return
    yield "  backend: torch"
    yield f"  model: {_value(found.model_path)}"
    if found.projector_path is not None and found.projector is not None:
        length, tokens = found.projector.input_dim, found.projector.num_tokens
        yield from _say(f"Turns vectors of length {length} into {tokens} soft token(s).")
        yield f"  projector: {_value(found.projector_path)}"
    kept = str(found.model.get("dtype") or found.model.get("torch_dtype") or "nothing of it")
    low = kept in ("bfloat16", "float16")
    slow = " On a CPU without bfloat16 instructions float32 is as fast." if low else ""
    yield from _say(f"config.json says {kept}.{slow}")
    yield f"  dtype: {'bfloat16' if low else 'float32'}"
    yield "  device: auto    # CUDA when there is one"


def _items(found: Found) -> Iterator[str]:
    if found.sids is None:
        yield from _say("The catalog has no column sid: items are named by a text.", 0)
        yield "text:"
        yield f"  column: {_value(found.text_column)}"
        yield f"  max_tokens: {_up(found.text_tokens)}    # the longest has {found.text_tokens}"
        return
    sids = found.sids
    levels = len(sids.sizes)
    yield from _say(f"Semantic IDs of {levels} levels; the catalog holds them as {sids.form}.", 0)
    yield "sid:"
    yield from _say(f"Codes of each level: {sids.why_sizes}.")
    yield f"  sizes: {_value(list(sids.sizes))}"
    yield from _say(f"Text of each level's tokens: {sids.why_tokens}.")
    yield f"  tokens: {_value(list(sids.patterns))}"
    if sids.end_token is not None:
        yield from _say("Some semantic IDs are the beginning of others; this token ends them.")
        yield f"  end_token: {_value(sids.end_token)}"


# --- prompt ---------------------------------------------------------------------------------------


def _slots(found: Found) -> tuple[list[str], list[str]]:
    """Slots of the template, and what is left out and why."""
    users, spec = found.users, found.projector
    slots: list[str] = []
    left: list[str] = []
    if users.vector_dim is not None:
        if found.model_path is not None and spec is None:
            left.append("{user_vector}: needs engine.projector (--projector DIR)")
        elif spec is not None and spec.input_dim != users.vector_dim:
            lengths = (
                f"vectors have length {users.vector_dim}, the projector takes {spec.input_dim}"
            )
            left.append(f"{{user_vector}}: {lengths}")
        else:
            slots.append("{user_vector}")
    if users.history_items:
        slots.append("{history}")
    if users.has_user_sid and found.sids is not None:
        left.append("{user_sid}")
    return slots, left + _text_slots(users)


def _text_slots(users: UsersGuess) -> list[str]:
    """Slots of text and scalar columns."""
    plain = (*(("segment",) if users.has_segment else ()), *users.scalars)
    return [f"{{text:{name}}}" for name in users.texts] + [f"{{{name}}}" for name in plain]


def _prompt(found: Found) -> Iterator[str]:
    slots, left = _slots(found)
    yield "prompt:"
    yield from _say(
        "Exactly what the model saw in training: put its text and special tokens between the "
        "slots. The next token is the first one of an item."
    )
    if found.vocabulary is not None and found.vocabulary.special:
        yield from _say(f"Other added tokens of this tokenizer: {found.vocabulary.shown}.")
    if left:
        yield from _say(f"Columns that are left out: {', '.join(left)}.")
    if found.users.ignored:
        yield from _say(f"Cannot be used: {'; '.join(found.users.ignored)}.")
    if slots:
        yield from _template(found, slots)
    else:
        yield from _template_of_text(found)
    longest, why = _longest(found, _items_kept(found) if "{history}" in slots else 0)
    yield f"  max_tokens: {longest}    # {why}"


def _template(found: Found, slots: list[str]) -> Iterator[str]:
    begin = "" if found.model_path else "User "  # bytes are tokens to the fake backend
    template, separator = begin + "".join(slots), ""
    around = _markers(found)
    if around is not None:
        template = template.replace("{history}", f"{around[0]}{{history}}{around[1]}") + around[0]
        separator = around[1] + around[0]
    yield f"  template: {json.dumps(template, ensure_ascii=False)}"
    if "{history}" in slots:
        most = found.users.history_items
        yield from _say(
            f"The last item of a list is the latest; 99 % of the users looked at have up to {most}."
        )
        yield f"  history_max_items: {_items_kept(found)}"
        yield f"  history_separator: {json.dumps(separator)}"


def _template_of_text(found: Found) -> Iterator[str]:
    """Nothing that a model is usually trained with: something must tell users apart."""
    slot = next(iter(_text_slots(found.users)), "{user_id}")
    yield f"  template: {json.dumps(slot)}"
    if slot != "{user_id}":
        yield '  null_text: "?"    # written where the column is null'


def _items_kept(found: Found) -> int:
    return min(max(found.users.history_items or 1, 1), _MOST_HISTORY)


def _markers(found: Found) -> tuple[str, str] | None:
    """Tokens that this tokenizer has to open and to close a semantic ID (OpenOneRec)."""
    if found.vocabulary is None or found.sids is None or found.sids.end_token is not None:
        return None
    begin = found.vocabulary.token_like("sid", "begin")
    end = found.vocabulary.token_like("sid", "end")
    return (begin, end) if begin and end and found.users.history_items else None


def _longest(found: Found, items: int) -> tuple[int, str]:
    """prompt.max_tokens, and where it comes from."""
    levels = len(found.sids.sizes) if found.sids else found.text_tokens
    ends = found.sids is not None and found.sids.end_token is not None
    per_item = levels + (2 if _markers(found) else 0) + (1 if ends else 0)
    soft = found.projector.num_tokens if found.projector else 1
    needed = _up(items * per_item + soft + _MARGIN) if items else _TEXT_PROMPT
    limit = found.model.get("max_position_embeddings")
    if isinstance(limit, int) and needed + levels + 1 > limit:
        return max(1, limit - levels - 1), f"the model has {limit} positions"
    if not items:
        return needed, "the longest prompt; a longer one is set aside"
    return needed, f"{items} items of {per_item} tokens, and room; then the oldest history goes"


def _up(number: int) -> int:
    return max(1, -(-number // _ROUND)) * _ROUND


# --- inputs, task, output -------------------------------------------------------------------------


def _inputs(found: Found) -> Iterator[str]:
    users = found.users
    has = [f"user_id {users.id_type}"]
    has += [f"embedding of length {users.vector_dim}"] if users.vector_dim is not None else []
    has += ["history"] if users.history_items is not None else []
    yield "inputs:"
    yield from _say(f"{users.rows:,} users: {', '.join(has)}.")
    yield f"  users: {_value(found.users_path)}"
    if found.days:
        names = ", ".join(found.days)
        yield from _say(f"A part for each day, of which a run reads its own: {names}.")
    yield from _say(f"{found.num_items:,} items.")
    yield f"  catalog: {_value(found.catalog_path)}"
    if found.candidates_path is not None and found.shape is not None:
        yield from _say(f"Items to score: {_SHAPES[found.shape]}.")
        yield f"  candidates: {_value(found.candidates_path)}"
    if found.exclusions_path is not None:
        yield from _say("Never recommended to that user.")
        yield f"  exclusions: {_value(found.exclusions_path)}"


_SHAPES = {
    "long": "a row per user and item",
    "wide": "a list per user",
    "segment": "a list per segment",
    "shared": "one set for all users",
}


def _task(found: Found) -> Iterator[str]:
    scores = found.candidates_path is not None
    yield "task:"
    yield f"  k: {min(20, found.num_items)}    # recommendations per user"
    if found.users.history_items:
        yield from _say(
            "What a user has is not recommended again. false where people come back to the same "
            "items, as with music or groceries."
        )
        yield "  exclude_history: true"
    if found.attributes:
        yield from _say(
            f"`eligibility: …` would choose by the catalog's {', '.join(found.attributes)}."
        )
    if found.sids is not None and found.sids.shared:
        if scores or not found.has_popularity:
            yield "  collisions: all    # items that share a semantic ID share a score"
        else:
            yield "  collisions: most_popular    # of items that share a semantic ID"
    if scores:
        yield "  score: {}    # rank the candidates"
        if found.sids is not None:
            yield "  # generate: {width: 64}    # and search the catalog, over the same prefill"
        return
    yield from _say("No --candidates were given: search the whole catalog.")
    yield "  generate:"
    yield "    width: 64    # beams per level; wider finds more and costs more"


def _rest(found: Found) -> Iterator[str]:
    yield "output:"
    yield "  path: recommendations    # rows land in ds=…/surface=…/ below it"
    yield ""
    yield "run:"
    yield "  work_dir: runs    # a run that was stopped resumes from here"
    yield ""
    yield "audit:    # a run that fails a gate publishes nothing"
    yield "  max_quarantine_rate: 0.1    # share of the users whose rows cannot be used"
    yield from _say(
        "A users table that was cut short gives fewer rows, and every user in it a list: coverage "
        "does not notice. The number of rows beside the run published before does."
    )
    yield "  max_row_change: 0.5"
    if found.users.history_items:
        yield "  max_unknown_history: 0.2    # share of history items not in the catalog"
    yield "  min_distinct_lists: 0.05    # 1: no two users of a sample have the same list"

"""Beams of an engine's own search: open vocabulary, over-generated, and then held against the
catalog.

Such a search knows no trie: part of its beams name no item (17 to 27 % in public measurements of
general engines on semantic IDs, sglang PR #31626), some may be empty, doubled or without a score.
They are dropped and counted, never repaired; the list of a user may be short, and it has no
certificate. Constrained beams (engine/generate/search.py) have none of this and forward each prompt
once per level; `task.generate.mode: auto` weighs the two.

Legend: B prompts, W beams, L tokens of a semantic ID, H hypotheses left.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.backend import Backend
from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.scoring.items import score_in_parts
from engine.trees.device_trie import DeviceTrie
from engine.trees.sid_trie import SidTrie
from schemas.errors import EngineError
from schemas.requests import Ints, Ragged, SidBeams
from schemas.search_work import NativeBeams
from schemas.settings import GenerateSettings, RunConfig

log = logging.getLogger("nightshelf.beams")
_LONG_PROMPT = 2048  # tokens; from here on a prompt sent once per level costs more than its beams
_WIDE = 256  # beams; beyond, the sampler's own store and its copies grow out of hand


class Raw(Protocol):
    """Beams as an engine gave them."""

    @property
    def tokens(self) -> Ints:
        """`[B, W, L]`, -1 behind a beam's end."""

    @property
    def length(self) -> Ints:
        """`[B, W]` tokens that came; 0: an empty beam."""

    @property
    def score(self) -> NDArray[np.float32]:
        """`[B, W]` sum of log p over the whole vocabulary; NaN: none was given."""

    @property
    def failed(self) -> NDArray[np.bool_]:
        """`[B]` requests that the engine refused."""


@runtime_checkable
class NativeBackend(Protocol):
    """A backend with a beam search of its own, besides what engine/backend.py asks for."""

    def start_beams(self, *, width: int, steps: int, prompt_tokens: int) -> None:
        """Make the search ready."""

    def native_beams(self, context: Any) -> Raw:
        """Beams behind every prompt of a context."""


@dataclass(frozen=True, slots=True)
class _Valid:
    """Hypotheses that name an item: by prompt, best first, each SID once."""

    prompt: Ints  # [H]
    sid: Ints  # [H]
    score: NDArray[np.float32]  # [H]


def uses_native_beams(
    config: RunConfig, settings: GenerateSettings, trie: SidTrie, backend: Backend
) -> bool:
    """Whether this run's beams are the engine's own; `auto` says why in the log.

    Raises:
        EngineError: `native` is asked for and cannot be.
    """
    if settings.mode == "constrained":
        return False
    obstacle = _obstacle(config, settings, trie, backend)
    if settings.mode == "native" and obstacle is not None:
        raise EngineError(
            "task.generate.mode: native cannot be used here",
            got=obstacle,
            do="Use task.generate.mode: constrained, or auto.",
        )
    if settings.mode == "native":
        return True
    why = obstacle or _preference(config, settings)
    chosen = "native" if why is None else "constrained"
    reason = why or f"prompts may have {_LONG_PROMPT} tokens and more"
    # A warning, so that it is seen: nobody configures a logger for a worker.
    log.warning("task.generate.mode auto: %s beams, because %s", chosen, reason)
    return why is None


def _obstacle(
    config: RunConfig, settings: GenerateSettings, trie: SidTrie, backend: Backend
) -> str | None:
    """Why native beams cannot be used; None: they can."""
    if not isinstance(backend, NativeBackend):
        return f"backend {backend.facts.name} has no beam search of its own"
    if (trie.depth_of_node[trie.node_of_sid] != trie.depth).any():
        return "semantic IDs differ in length, and its beams have one length"
    if settings.exact:
        return "exact: true needs a certificate"
    if not isinstance(settings.width, int):
        return "width is a list, and its beams have one width"
    if config.task.score_norm != "full_vocab" and not settings.rescore:
        return f"score_norm {config.task.score_norm} needs rescore: true"
    return None


def _preference(config: RunConfig, settings: GenerateSettings) -> str | None:
    """Why constrained beams are preferred; None: native ones are."""
    if config.inputs.exclusions is not None or config.task.eligibility is not None:
        return "exclusions would shorten its lists"
    if config.inputs.self_contained:
        return "the users table may hold exclusions, which would shorten its lists"
    if config.prompt.max_tokens < _LONG_PROMPT:
        return f"prompts are below {_LONG_PROMPT} tokens"
    if max(settings.widths(len(config.space.sizes))) > _WIDE:
        return f"the width is above {_WIDE}"
    return None


def search_natively(
    decoding: Decoding, settings: GenerateSettings, *, k: int, max_rows: int
) -> tuple[SidBeams, NDArray[np.bool_], NativeBeams]:
    """The engine's beams that name an item, for every prompt; prompts that failed; and counts."""
    assert isinstance(decoding.backend, NativeBackend), "`uses_native_beams` looked"
    width = max(settings.widths(decoding.index.trie.depth))
    raw = decoding.backend.native_beams(decoding.context)
    valid, counts = match_catalog(raw, decoding.index)
    if settings.rescore:
        valid = _rescored(decoding, valid, max_rows)
    # Beams without a score are no answer; beams with one that name no item are.
    failed = raw.failed | ~np.isfinite(raw.score).any(axis=1)
    failed[valid.prompt[~np.isfinite(valid.score)]] = True
    num = decoding.num_prompts
    if settings.compare_users:
        prompts = np.arange(min(settings.compare_users, num), dtype=np.int64)
        counts = counts + _overlap(decoding, valid, prompts, width, k)
    nothing_known = np.full(num, np.nan, dtype=np.float32)
    beams = SidBeams(
        user=valid.prompt,
        sid=valid.sid,
        score=valid.score,
        pruned=np.full(num, np.inf, dtype=np.float32),  # no certificate
        legal_mass=nothing_known,
        width=np.full(num, width, dtype=np.int64),
    )
    return beams, failed, counts


def match_catalog(raw: Raw, index: DeviceTrie) -> tuple[_Valid, NativeBeams]:
    """Drop what names no item or has no score, and what came twice; count all of it."""
    trie = index.trie
    num, width, steps = raw.tokens.shape
    prompt = np.repeat(np.arange(num, dtype=np.int64), width)
    length, score = raw.length.reshape(-1), raw.score.reshape(-1)
    answered = ~raw.failed[prompt]
    whole = answered & (length == steps)
    finite = whole & np.isfinite(score)
    sid = np.full(len(prompt), -1, dtype=np.int64)
    at = np.flatnonzero(finite)
    sid[at] = sids_of(trie, index, raw.tokens.reshape(-1, steps)[at])
    named = np.flatnonzero(sid >= 0)
    order = named[np.lexsort((sid[named], -score[named].astype(np.float64), prompt[named]))]
    _, first = np.unique(prompt[order] * trie.num_sids + sid[order], return_index=True)
    kept = order[np.sort(first)]
    counts = NativeBeams(
        beams=int(answered.sum()),
        incomplete=int((answered & ~whole).sum()),
        without_score=int((whole & ~finite).sum()),
        invalid=int((finite & (sid < 0)).sum()),
        doubled=len(named) - len(kept),
    )
    return _Valid(prompt[kept], sid[kept], score[kept].astype(np.float32)), counts


def sids_of(trie: SidTrie, index: DeviceTrie, tokens: Ints) -> Ints:
    """The SID that each row of `tokens` `[H, L]` spells, -1: none."""
    node = np.zeros(len(tokens), dtype=np.int64)
    alive = np.ones(len(tokens), dtype=bool)
    for level in range(tokens.shape[1]):
        columns = index.token_ids[level]
        by_id = np.argsort(columns, kind="stable")
        place = np.searchsorted(columns[by_id], tokens[:, level]).clip(max=len(columns) - 1)
        code = by_id[place]
        alive &= columns[code] == tokens[:, level]
        first = trie.first_child[node].astype(np.int64)
        last = trie.first_child[node + 1].astype(np.int64)
        child = _child(trie, node, code, level + 1)
        alive &= (child >= first) & (child < last)
        node = np.where(alive, child, 0)
        alive &= trie.code[node] == code
    sids: Ints = np.where(alive, trie.sid_of_node[node], -1).astype(np.int64)
    return sids


def _child(trie: SidTrie, node: Ints, code: Ints, depth: int) -> Ints:
    """Where the child of a node with this code stands, or would: a level is ordered by both."""
    level = trie.level(depth)
    size = int(trie.code[level].max()) + 2
    keys = trie.parent[level].astype(np.int64) * size + trie.code[level]
    found = level.start + np.searchsorted(keys, node * size + np.minimum(code, size - 1))
    place: Ints = np.minimum(found, level.stop - 1).astype(np.int64)
    return place


def _rescored(decoding: Decoding, valid: _Valid, max_rows: int) -> _Valid:
    """The same SIDs with the scores that the scoring task gives them, best first again."""
    trie = decoding.index.trie
    lengths = np.bincount(valid.prompt, minlength=decoding.num_prompts)
    items = trie.items[trie.first_item[valid.sid]]
    with decoding.temporary():
        scores, _ = score_in_parts(decoding, Ragged.from_lengths(lengths, items), max_rows)
    score = scores.float().cpu().numpy()
    order = np.lexsort((valid.sid, -score.astype(np.float64), valid.prompt))
    return _Valid(valid.prompt[order], valid.sid[order], score[order])


def _overlap(decoding: Decoding, valid: _Valid, prompts: Ints, width: int, k: int) -> NativeBeams:
    """How many of the constrained top k of some prompts the native top k has."""
    index = decoding.index
    with decoding.temporary():
        beams = beam_search(
            decoding, prompts=index.put(prompts), widths=(width,) * index.trie.depth, k=k
        )
    sid, found = beams.sid.cpu().numpy(), beams.score.cpu().numpy() > -np.inf
    common = 0
    for row, prompt in enumerate(prompts):
        native = valid.sid[valid.prompt == prompt][:k]
        common += len(np.intersect1d(sid[row][found[row]], native))
    return NativeBeams(compared=int(found.sum()), in_common=common)

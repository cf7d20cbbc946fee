"""The best k SIDs of the whole catalog for every prompt: which search, how far, and what is known.

`auto` and `best_first` search the trie best first (engine/search/best_first.py): lists are the
model's exact top k by construction, unless a budget ends a search as a beam. `beam` keeps a fixed
number of prefixes per level (beam_search.py): lists have a certificate or none.

`plain.py` says in a few obvious lines what both find: the beam search with its widths, the other
with widths that hold everything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.decoding import Decoding
from engine.generate.beam_search import beams_of_group, search_by_beams
from engine.generate.bounds import nodes_per_prompt
from engine.search.best_first import Bounds, Found, Limits, best_first
from engine.search.cost import first_round, usual_nodes
from engine.search.masks import Mask, SegmentMask
from engine.trees.device_trie import DeviceTrie
from engine.trees.search_tree import catalog_tree
from engine.trees.sid_trie import SidTrie
from schemas.requests import UNSCORED, SidBeams
from schemas.search_work import SearchWork
from schemas.settings import GenerateSettings

_BUDGET = 4  # times what the beam forwards, or a search of a trained model
_MOST_CHILDREN = 1 << 24  # of the prefixes that are expanded together; bounds a round's memory


def search(
    decoding: Decoding,
    settings: GenerateSettings,
    *,
    widths: tuple[int, ...],
    k: int,
    dead: Tensor | None = None,
    segments: SegmentMask | None = None,
    bounds: Bounds | None = None,
) -> tuple[SidBeams, NDArray[np.bool_], SearchWork]:
    """The best k SIDs of every prompt of the context, whose search failed, and what it took.

    Args:
        widths: beams kept after each level, of the search that ends as a beam or is one.
        dead: sorted keys of the prefixes each prompt may not enter (`dead_nodes`), where `user` is
            the prompt's row in the context.
        segments: the prefixes that whole segments of prompts may enter.
        bounds: of single prompts, for a best-first search: it need not find what lies below.
    """
    if settings.search == "beam":
        return search_by_beams(decoding, settings, widths=widths, k=k, dead=dead, segments=segments)
    index, facts = decoding.index, decoding.backend.facts
    tree = catalog_tree(index)
    first = first_round(facts, decoding.num_prompts)
    limits = limits_of(settings, index, widths, k, first=first)
    prompts = torch.arange(decoding.num_prompts, device=index.device)
    at_once = max(1, _MOST_CHILDREN // _most_children(index.trie, limits))
    parts = [prompts[at : at + at_once] for at in range(0, len(prompts), at_once)]
    masks = (Mask(part, dead, segments) for part in parts)
    found = [best_first(decoding, tree, mask, limits, bounds) for mask in masks]
    failed = torch.cat([one.failed_for_good for one in found]).cpu().numpy()
    work = SearchWork(
        nodes=torch.cat([one.nodes for one in found]).cpu().numpy(),
        rounds=torch.cat([one.rounds for one in found]).cpu().numpy(),
        stopped=torch.cat([one.stopped for one in found]).cpu().numpy(),
    )
    return _lists(found, max(widths), index.norms[0].kind == "full_vocab"), failed, work


def limits_of(
    settings: GenerateSettings,
    index: DeviceTrie,
    widths: tuple[int, ...],
    k: int,
    *,
    first: int,
) -> Limits:
    """How far each search goes, with so many prefixes of a prompt in its `first` rounds."""
    per_group = tuple(beams_of_group(index, width, k, at + 1) for at, width in enumerate(widths))
    beam = nodes_per_prompt(index.trie, widths)
    budget = settings.max_positions
    if budget is None:
        usual = _BUDGET * max(beam, usual_nodes(k))
        budget = settings.max_width * index.trie.depth if settings.exact else usual
    return Limits(
        k=k,
        first=first,
        budget=budget,
        detect_flat=settings.search == "auto" and not settings.exact,
        widths=widths,
        per_group=per_group,
    )


def _most_children(trie: SidTrie, limits: Limits) -> int:
    """Of the prefixes of one prompt that a round expands: what it takes in memory."""
    prefixes = max(limits.in_round(1 << 10), *limits.widths)
    return max(1, *(trie.most_children(depth, prefixes) for depth in range(trie.depth)))


def _lists(found: list[Found], width: int, mass: bool) -> SidBeams:
    """Flat results on the host, prompts in order, best first.

    Args:
        width: of the beams that searches ended as.
        mass: the children of the root have a probability in the whole vocabulary.
    """

    def joined(name: str) -> NDArray[Any]:
        every = [getattr(one, name) for one in found]
        array: NDArray[Any] = torch.cat(every).cpu().numpy()
        return array

    score = torch.cat([one.pool.score for one in found]).cpu().numpy()
    sid = torch.cat([one.pool.sid for one in found]).cpu().numpy()
    user, place = np.nonzero(score > -np.inf)
    # Probability 0 for something legal: a list that is short because of it is not exact.
    refused = np.where(joined("refused"), UNSCORED, np.float32(-np.inf))
    return SidBeams(
        user=user.astype(np.int64),
        sid=sid[user, place],
        score=score[user, place],
        pruned=np.maximum(joined("dropped"), refused),
        legal_mass=joined("legal_mass") if mass else np.full(len(score), np.nan, np.float32),
        width=np.where(joined("stopped"), width, 0),
    )

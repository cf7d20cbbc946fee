"""Beam search for a batch, and exact mode: who is not certified is searched again, wider, over the
same prefill, until everyone is or the widest beam is reached.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.backend import Backend, Context
from engine.generate.beam_step import SegmentMask
from engine.generate.search import Beams, beam_search, join_beams, most_slots
from engine.trees.device_trie import DeviceTrie
from schemas.requests import UNSCORED, Ints, SidBeams
from schemas.settings import GenerateSettings

_MAX_SLOTS = 1 << 24  # child slots of the beams that step together; bounds a step's memory


def search(
    backend: Backend,
    context: Context,
    index: DeviceTrie,
    settings: GenerateSettings,
    *,
    widths: tuple[int, ...],
    k: int,
    dead: Tensor | None = None,
    segments: SegmentMask | None = None,
) -> tuple[SidBeams, np.ndarray, Ints]:
    """The best k SIDs of every prompt of the context, whose NaN failed, and nodes forwarded."""
    num_users = context.num_prompts
    everyone = np.arange(num_users, dtype=np.int64)

    def beams_of(rows: Ints, widths: tuple[int, ...]) -> Beams:
        prompts = torch.from_numpy(rows).to(index.device)
        some = max(1, _MAX_SLOTS // most_slots(index, widths))
        return join_beams(
            [
                beam_search(
                    backend,
                    context,
                    index,
                    prompts=prompts[at : at + some],
                    widths=widths,
                    k=k,
                    dead=dead,
                    segments=segments,
                )
                for at in range(0, len(prompts), some)
            ]
        )

    result = _HostBeams(beams_of(everyone, widths), num_users, max(widths))
    open_rows = result.uncertified()
    while settings.exact and len(open_rows) and min(widths) < settings.max_width:
        widths = tuple(min(2 * max(w, 1), settings.max_width) for w in widths)
        result.replace(open_rows, beams_of(open_rows, widths), max(widths))
        open_rows = result.uncertified()
    return result.beams(), result.failed, result.rows


class _HostBeams:
    """Beams of a batch on the host, some of them replaced by wider searches."""

    def __init__(self, beams: Beams, num_users: int, width: int) -> None:
        self._sid = beams.sid.cpu().numpy().copy()
        self._score = beams.score.float().cpu().numpy().copy()
        self._pruned = beams.pruned.float().cpu().numpy().copy()
        self._mass = beams.legal_mass.float().cpu().numpy()
        self.failed = beams.failed.cpu().numpy().copy()
        self.rows = beams.rows.cpu().numpy().copy()
        self._width = np.full(num_users, width, dtype=np.int64)

    def uncertified(self) -> Ints:
        """Users whose worst result does not beat what was dropped, or who lack results for it."""
        worst = self._score[:, -1]  # -inf when there are fewer than k
        certified = (worst > self._pruned) | (self._pruned <= UNSCORED)  # which no width changes
        return np.flatnonzero(~certified & ~self.failed).astype(np.int64)

    def replace(self, users: Ints, beams: Beams, width: int) -> None:
        """Take a wider search's answer for `users`."""
        self._sid[users] = beams.sid.cpu().numpy()
        self._score[users] = beams.score.float().cpu().numpy()
        self._pruned[users] = beams.pruned.float().cpu().numpy()
        self.failed[users] |= beams.failed.cpu().numpy()
        self.rows[users] += beams.rows.cpu().numpy()
        self._width[users] = width

    def beams(self) -> SidBeams:
        """Flat results, users in order, best first."""
        user, place = np.nonzero(self._score > -np.inf)
        return SidBeams(
            user=user.astype(np.int64),
            sid=self._sid[user, place],
            score=self._score[user, place],
            pruned=self._pruned,
            legal_mass=self._mass,
            width=self._width,
        )

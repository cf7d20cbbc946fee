"""Prompts of a whole shard at once: each slot becomes (tokens, lengths), and one pass lays them
out.

Nothing here loops over users; text is tokenised by the tokenizer's own batch call. When a prompt is
too long its oldest history items go, whole items at a time; nothing else is ever cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.backend import PackedPrompts
from engine.prompts.tokenizer import Tokenizer
from engine.trees.sid_trie import SidTrie
from schemas.requests import Ints, Ragged, Rejection, UserBatch
from schemas.semantic_ids import BoundSidSpace, ItemTokens
from schemas.settings import PromptSettings
from schemas.templates import Segment

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of U users, without the static prefix they share."""

    tokens: Ragged  # [U]
    static_prefix: Ints  # [P]
    soft_start: Ints  # [U] where the soft tokens begin in each prompt, -1: the template has none
    num_soft: int
    truncated: Ints  # [U] history tokens dropped to fit
    rejections: list[Rejection]

    @property
    def lengths(self) -> Ints:
        """Tokens of each prompt, the static prefix included `[U]`."""
        return self.tokens.lengths + len(self.static_prefix)

    def pack(self, users: Ints, soft_vectors: Tensor | None) -> PackedPrompts:
        """The prompts of `users` end to end; `soft_vectors` `[users * num_soft, hidden]`."""
        tokens = self.tokens.take(users)
        positions = np.empty(0, dtype=np.int64)
        if soft_vectors is not None:
            first = tokens.offsets[:-1] + self.soft_start[users]
            positions = (first[:, None] + np.arange(self.num_soft)).reshape(-1)
        return PackedPrompts(
            token_ids=tokens.values,
            offsets=tokens.offsets,
            static_prefix=self.static_prefix,
            soft_positions=positions,
            soft_vectors=soft_vectors,
        )


class PromptBuilder:
    """Prompts of one template, tokenizer and catalog; static text is tokenised once, here."""

    def __init__(
        self,
        settings: PromptSettings,
        tokenizer: Tokenizer,
        tokens: ItemTokens | None,
        trie: SidTrie | None,
        num_soft: int,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._trie = trie  # with its tokens, needed where a slot holds items
        self._num_soft = num_soft
        template = settings.parsed
        static = [
            np.asarray(tokenizer.encode_template(s.text), dtype=np.int64)
            for s in template.segments[: template.num_static]
        ]
        self._segments = template.segments[template.num_static :]
        self._static_text = {
            s.text: np.asarray(tokenizer.encode_template(s.text), dtype=np.int64)
            for s in self._segments
            if s.kind == "static"
        }
        separator = tokenizer.encode_template(settings.history_separator)
        self._separator = np.asarray(separator, dtype=np.int64)
        prefix = np.concatenate(static) if static else np.empty(0, dtype=np.int64)
        # A prompt must keep one token of its own to predict from: when no later segment is sure to
        # have one, the last static token is forwarded per user instead of being shared.
        sure = any(
            s.kind == "user_vector" or (s.kind == "static" and len(self._static_text[s.text]))
            for s in self._segments
        )
        kept = len(prefix) if sure else max(len(prefix) - 1, 0)
        self.static_prefix, self._lead = prefix[:kept], prefix[kept:]

    def build(self, users: UserBatch) -> PromptSet:
        """Prompts of all users; those that cannot be built are named in `rejections`."""
        num = users.num_users
        parts: list[Ragged] = [_repeat(self._lead, num)] if len(self._lead) else []
        soft_part: int | None = None
        history_part: int | None = None
        for segment in self._segments:
            if segment.kind == "user_vector":
                soft_part = len(parts)
            if segment.kind == "history":
                history_part = len(parts)
                parts.append(Ragged.empty(num))  # filled last, with the room that is left
            else:
                parts.append(self._fill(segment, users))

        budget = self._settings.max_tokens - len(self.static_prefix)
        total = sum((part.lengths for part in parts), start=np.zeros(num, dtype=np.int64))
        truncated = np.zeros(num, dtype=np.int64)
        if history_part is not None:
            parts[history_part], truncated = self._fit_history(users.history, budget - total)
            total = total + parts[history_part].lengths
        rejections = [
            Rejection(
                int(u),
                "prompt_too_long",
                f"the prompt has {int(total[u]) + len(self.static_prefix)} tokens without history, "
                f"prompt.max_tokens is {self._settings.max_tokens}",
            )
            for u in np.flatnonzero(total > budget)
        ]
        rejections += [
            Rejection(int(u), "empty_prompt", "the prompt has no token to predict from")
            for u in np.flatnonzero(total == 0)
        ]
        before = sum(
            (part.lengths for part in parts[: soft_part or 0]), start=np.zeros(num, dtype=np.int64)
        )
        return PromptSet(
            tokens=join(parts, num),
            static_prefix=self.static_prefix,
            soft_start=before if soft_part is not None else np.full(num, -1, dtype=np.int64),
            num_soft=self._num_soft,
            truncated=truncated,
            rejections=rejections,
        )

    def _fill(self, segment: Segment, users: UserBatch) -> Ragged:
        num = users.num_users
        if segment.kind == "static":
            return _repeat(self._static_text[segment.text], num)
        if segment.kind == "user_vector":
            return _repeat(np.zeros(self._num_soft, dtype=np.int64), num)
        if segment.kind == "user_sid":
            assert users.user_sids is not None, "user_sid slot without codes"
            space = self._tokens
            assert isinstance(space, BoundSidSpace), "the configuration checked it"
            place = np.arange(len(users.user_sids.values)) - np.repeat(
                users.user_sids.offsets[:-1], users.user_sids.lengths
            )
            tokens = space.tokens(place % space.num_levels, users.user_sids.values)
            return Ragged(users.user_sids.offsets, tokens)
        ids = self._tokenizer.encode_texts(users.texts[segment.column])
        lengths = np.asarray([len(one) for one in ids], dtype=np.int64)
        flat = [token for one in ids for token in one]
        return Ragged.from_lengths(lengths, np.asarray(flat, dtype=np.int64))

    def _latest(self, history: Ragged | None) -> Ragged:
        assert history is not None, "history slot without history"
        from_end = np.repeat(history.offsets[1:], history.lengths) - np.arange(len(history.values))
        return history.keep(from_end <= self._settings.history_max_items)

    def _item_lengths(self, history: Ragged) -> Ints:
        """Tokens of each history item, the separator behind it included `[items]`."""
        trie = self._trie
        assert trie is not None, "history slot without a catalog"
        node = trie.node_of_sid[trie.sid_of_item[history.values]]
        lengths = trie.depth_of_node[node].astype(np.int64)
        last = np.zeros(len(history.values), dtype=bool)
        last[history.offsets[1:][history.lengths > 0] - 1] = True
        return np.where(last, lengths, lengths + len(self._separator))

    def _fit_history(self, history: Ragged | None, room: Ints) -> tuple[Ragged, Ints]:
        """The latest items that fit into `room` tokens per user, and the tokens dropped."""
        latest = self._latest(history)
        lengths = self._item_lengths(latest)
        cumulative = np.concatenate([[0], np.cumsum(lengths)])
        to_end = np.repeat(cumulative[latest.offsets[1:]], latest.lengths) - cumulative[:-1]
        fits = to_end <= np.repeat(room, latest.lengths)
        kept = latest.keep(fits)
        dropped = np.bincount(
            latest.row_ids[~fits], weights=lengths[~fits], minlength=latest.num_rows
        )
        return self._items(kept), dropped.astype(np.int64)

    def _items(self, history: Ragged) -> Ragged:
        """The items' tokens, separators between them."""
        assert self._trie is not None, "history slot without a catalog"
        assert self._tokens is not None, "history slot without tokens of items"
        sids = self._trie.sid_of_item[history.values]
        codes = self._trie.codes_of_sid[sids].astype(np.int64)  # [items, L]
        tokens = self._tokens.tokens(np.arange(codes.shape[1]), np.maximum(codes, 0))
        table = np.concatenate([tokens, np.tile(self._separator, (len(tokens), 1))], axis=1)
        present = np.ones(table.shape, dtype=bool)
        present[:, : codes.shape[1]] = codes >= 0
        last = history.offsets[1:][history.lengths > 0] - 1
        present[last, codes.shape[1] :] = False
        per_item = present.sum(axis=1)
        lengths = np.bincount(history.row_ids, weights=per_item, minlength=history.num_rows)
        return Ragged.from_lengths(lengths.astype(np.int64), table[present])


def join(parts: list[Ragged], num_rows: int) -> Ragged:
    """Row by row, the parts' lists one after another."""
    total = sum((part.lengths for part in parts), start=np.zeros(num_rows, dtype=np.int64))
    out = Ragged.from_lengths(total, np.empty(0, dtype=np.int64))
    values = np.empty(int(out.offsets[-1]), dtype=np.int64)
    begin = out.offsets[:-1].copy()
    for part in parts:
        shift = np.repeat(begin - part.offsets[:-1], part.lengths)
        values[shift + np.arange(len(part.values))] = part.values
        begin += part.lengths
    return Ragged(out.offsets, values)


def _repeat(tokens: Ints, rows: int) -> Ragged:
    return Ragged(np.arange(rows + 1, dtype=np.int64) * len(tokens), np.tile(tokens, rows))

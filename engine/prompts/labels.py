"""Labels as tokens of the model: the configured ones, and users' own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.backend import TokenColumns
from engine.prompts.tokenizer import Tokenizer
from schemas.errors import EngineError, quoted
from schemas.requests import Ints, Labels, Ragged, Rejection
from schemas.settings import LabelSettings


@dataclass(frozen=True, slots=True)
class LabelTokens:
    """Labels of a shard's users, as positions in `columns`; users whose labels cannot be read."""

    of_user: Ragged  # [U]
    columns: TokenColumns
    rejections: list[Rejection]

    def take(self, rows: Ints) -> LabelTokens:
        """The users at `rows`, none of whom was rejected."""
        return LabelTokens(self.of_user.take(rows), self.columns, [])


class LabelReader:
    """Label texts and ids as tokens of the model.

    The columns are the whole vocabulary, whatever labels there are: were they the labels of a
    shard, those of one user would change the last bits of another's scores.
    """

    def __init__(self, settings: LabelSettings, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._softmax = settings.softmax
        self.suffix = np.asarray(tokenizer.encode_template(settings.suffix), dtype=np.int64)
        self._columns = TokenColumns(np.arange(vocab_size, dtype=np.int64))
        tokens = [self._token(label) for label in settings.labels]
        for label, token in zip(settings.labels, tokens, strict=True):
            if token is None:
                raise EngineError(
                    "a label is not a token of the model",
                    expected=f"text of one token, or an id below {vocab_size}",
                    got=quoted(label),
                    where="task.label.labels",
                )
        if len(set(tokens)) < len(tokens):
            raise EngineError(
                "two labels are the same token",
                got=quoted(list(settings.labels)),
                where="task.label.labels",
            )
        self._default = np.asarray(tokens, dtype=np.int64)

    def _token(self, label: str | int | None) -> int | None:
        found = self._tokenizer.token_id(label) if isinstance(label, str) else label
        return found if found is not None and 0 <= found < self._vocab_size else None

    def read(self, labels: Labels | None, num_users: int) -> LabelTokens:
        """Each user's label tokens; an empty list means the default labels."""
        default = self._default
        if labels is None:
            of_user = Ragged.from_lengths(
                np.full(num_users, len(default)), np.tile(default, num_users)
            )
            return LabelTokens(of_user, self._columns, [])
        user, flat, lengths = self._flat(labels, default)
        rejections = self._rejections(labels, user, flat, lengths)
        return LabelTokens(
            Ragged.from_lengths(lengths, np.maximum(flat, 0)), self._columns, rejections
        )

    def _flat(self, labels: Labels, default: Ints) -> tuple[Ints, Ints, Ints]:
        """User and token of each label, -1 for what is no token; and how many each user has."""
        tokens = [self._token(name) for name in labels.names]
        ids = np.asarray([-1 if t is None else t for t in tokens], dtype=np.int64)
        empty = labels.of_user.lengths == 0
        lengths = np.where(empty, len(default), labels.of_user.lengths)
        flat = np.empty(int(lengths.sum()), dtype=np.int64)
        own = np.repeat(~empty, lengths)
        flat[own] = ids[labels.of_user.values]
        flat[~own] = np.tile(default, int(empty.sum()))
        return np.repeat(np.arange(len(lengths)), lengths), flat, lengths

    def _rejections(self, labels: Labels, user: Ints, flat: Ints, lengths: Ints) -> list[Rejection]:
        """Users whose labels cannot be used, each by the first rule that it breaks."""
        unknown = np.unique(user[flat < 0])
        limit = f"labels must be texts of one token each, or ids below {self._vocab_size}: "
        out = [
            Rejection(int(u), "label_unknown", limit + quoted(self._bad_names(labels, int(u))))
            for u in unknown
        ]
        pairs, counts = np.unique(np.stack([user, flat]), axis=1, return_counts=True)
        twice = np.setdiff1d(pairs[0][counts > 1], unknown)
        out += [Rejection(int(u), "label_twice", "a label stands more than once") for u in twice]
        if self._softmax:
            message = "a softmax over one label is 1 for every item"
            single = np.setdiff1d(np.flatnonzero(lengths == 1), unknown)
            out += [Rejection(int(u), "label_single", message) for u in single]
        return out

    def _bad_names(self, labels: Labels, user: int) -> list[str | int | None]:
        names = [labels.names[i] for i in labels.of_user.row(user)]
        return [name for name in names if self._token(name) is None]

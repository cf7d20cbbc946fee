"""`task.label`: the probability of labels behind every candidate; the first label ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from engine.prompts.labels import LabelReader
from engine.prompts.tokenizer import Tokenizer
from engine.tasks.candidates import CandidateRunner
from engine.tasks.task import Load, Pass, Runner, Setup, Task
from schemas.errors import ConfigError, NightshelfError, quoted
from schemas.requests import CandidateSets, Ints, ItemScores, Labels, Ragged, UserBatch
from schemas.settings import LabelSettings
from schemas.tables import LABEL_SCORES

if TYPE_CHECKING:
    from engine.packing.preparation import Preparation
    from engine.trees.token_tree import TokenTree


class Label(Task):
    """Asks the model about each candidate: p(label | prompt, item, suffix)."""

    name = "label"

    @property
    def settings(self) -> LabelSettings:
        """Its section."""
        assert self.config.task.label is not None, "the run labels"
        return self.config.task.label

    def check(self, tokenizer: Tokenizer, vocab_size: int | None) -> NightshelfError | None:
        """Each label is one token of the model, and no two are the same."""
        labels, tokens = self.settings.labels, []
        for label in labels:
            token = tokenizer.token_id(label) if isinstance(label, str) else label
            if token is None or not 0 <= token < (vocab_size or token + 1):
                return _no_token(label, vocab_size, tokenizer)
            tokens.append(token)
        if len(set(tokens)) == len(tokens):
            return None
        return ConfigError(
            "two labels are the same token", got=quoted(list(labels)), where="task.label.labels"
        )

    def suffix_tokens(self, tokenizer: Tokenizer) -> int:
        """Tokens between an item and its label."""
        return len(tokenizer.encode_template(self.settings.suffix))

    def label_reader(self, tokenizer: Tokenizer, vocab_size: int) -> LabelReader:
        """Reads the configured labels and users' own."""
        return LabelReader(self.settings, tokenizer, vocab_size)

    def rows_forwarded(self, load: Load) -> float:
        """All tokens of an item are forwarded: its labels are read behind the last."""
        return load.candidates * load.levels

    def columns(self) -> tuple[pa.Field, ...]:
        """The scores of all labels."""
        return (pa.field("labels", LABEL_SCORES, nullable=False),)

    def column_values(
        self, users: UserBatch, user: Ints, labels: NDArray[np.float32] | None
    ) -> dict[str, pa.Array]:
        """Each row's labels and their scores."""
        scores = np.empty((0, 0), dtype=np.float32) if labels is None else labels
        return {"labels": _label_lists(self.settings, users.labels, user, scores)}

    def start(self, setup: Setup) -> Runner:
        """Labelling at work."""
        return _Labelling(setup.preparation, self.settings)


def _no_token(label: str | int, vocab_size: int | None, tokenizer: Tokenizer) -> ConfigError:
    text = ""
    if isinstance(label, str):
        text = f", {len(tokenizer.encode_template(label))} tokens"
    return ConfigError(
        "a label is not one token of the model",
        expected="texts of one token each, as the model was trained to answer, or ids"
        + (f" below {vocab_size}" if vocab_size else ""),
        got=quoted(label) + text,
        where="task.label.labels",
    )


class _Labelling(CandidateRunner):
    def __init__(self, preparation: Preparation, settings: LabelSettings) -> None:
        super().__init__(preparation)
        self._softmax = settings.softmax

    def score(
        self, one: Pass, candidates: CandidateSets, tree: TokenTree
    ) -> tuple[ItemScores, Ints]:
        """Scores of all candidates, and the nodes forwarded per user `[U]`."""
        from engine.scoring.labels import label_items

        lists, labels = candidates.lists(), one.prepared.labels
        assert labels is not None, "prepared with the task"
        found, nodes = label_items(
            one.decoding,
            lists,
            labels.take(one.pack),
            suffix=self.preparation.label_suffix,
            softmax=self._softmax,
            max_rows=one.max_rows,
            tree=tree,
        )
        every = found.float().cpu().numpy()
        first = every[:, 0]
        return ItemScores(user=lists.row_ids, item=lists.values, score=first, labels=every), nodes


def _label_lists(
    settings: LabelSettings, labels: Labels | None, user: Ints, scores: NDArray[np.float32]
) -> pa.Array:
    """Each row's labels with their scores, in the order they were asked for."""
    default = len(settings.labels)
    names = [str(name) for name in (*settings.labels, *(labels.names if labels else ()))]
    if labels is None:
        mine = Ragged.from_lengths(
            np.full(len(user), default), np.tile(np.arange(default), len(user))
        )
    else:
        # An empty list stands for the configured labels, which are the first of the names.
        lists = Ragged(
            np.append(labels.of_user.offsets, len(labels.of_user.values) + default),
            np.concatenate([labels.of_user.values + default, np.arange(default)]),
        )
        own = labels.of_user.lengths[user] > 0
        mine = lists.take(np.where(own, user, labels.of_user.num_rows))
    place = np.arange(len(mine.values)) - mine.offsets[mine.row_ids]
    struct = pa.StructArray.from_arrays(
        [
            pa.array(names, pa.string()).take(pa.array(mine.values)),
            pa.array(scores[mine.row_ids, place]),
        ],
        names=["label", "score"],
    )
    return pa.ListArray.from_arrays(pa.array(mine.offsets, pa.int32()), struct)

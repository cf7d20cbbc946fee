"""What a shard becomes before any of it runs: prompts, packs, and users whose work is the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.packing.identical import first_of_its_kind
from engine.packing.packs import PackingBudget, pack_users
from engine.prompts.builder import PromptSet
from engine.prompts.labels import LabelTokens
from engine.trees.token_tree import TokenTree
from schemas.errors import AccountingError
from schemas.requests import Ints, Ragged, Rejection, UserBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A shard's users with their prompts, and which of them share a pass."""

    users: UserBatch
    prompts: PromptSet
    labels: LabelTokens | None
    tree_rows: Ints  # [U] nodes of each user's token tree
    cost: Ints  # [U] rows that each user takes in a pack
    candidate_tokens: Ints  # [U] tokens of each user's candidates, one by one
    shared_tree: TokenTree | None  # of the sets that users share
    same_as: Ints  # [U] the first user whose work is the same; itself where there is none before
    packs: list[Ints]  # users of each pass; those that are the same stand in one pack
    shared_prefix: int  # tokens at the beginning of all prompts that are forwarded once

    @property
    def rejections(self) -> list[Rejection]:
        """Users whose prompt cannot be built, or whose labels cannot be read."""
        return self.prompts.rejections + (self.labels.rejections if self.labels else [])

    @property
    def prompt_tokens(self) -> Ints:
        """Tokens of each prompt `[U]`."""
        return self.prompts.lengths

    @property
    def reused_tokens(self) -> Ints:
        """Tokens of each prompt that are not forwarded for this user `[U]`: the part that all
        prompts share, or the whole prompt of a user that is the same as one before."""
        new = self.same_as == np.arange(len(self.same_as))
        return np.where(new, self.shared_prefix, self.prompts.lengths)

    @property
    def truncated_tokens(self) -> Ints:
        """History tokens dropped to fit `[U]`."""
        return self.prompts.truncated


def same_work(
    users: UserBatch,
    prompts: PromptSet,
    labels: LabelTokens | None,
    usable: np.ndarray,
    *,
    items: bool,
) -> Ints:
    """For each user the first one with the same prompt, vector, candidates and limits `[U]`.

    A user that cannot be used stands for none that can. `items`: what a user must not get matters.
    """
    parts: list[Ragged | np.ndarray] = [prompts.tokens, usable.astype(np.int64)]
    if users.vectors is not None:
        parts.append(users.vectors)
    if users.candidates is not None:
        sets = users.candidates
        parts += [sets.of_user, sets.forbidden] if sets.shared else [sets.lists()]
    if labels is not None:
        parts.append(labels.of_user)
    if users.excluded is not None and items:
        parts.append(users.excluded)
    if users.eligibility is not None:
        parts.append(users.eligibility.segment)
    return first_of_its_kind(parts, users.num_users)


def pack_distinct(
    prompt_tokens: Ints, other_rows: Ints, usable: np.ndarray, same_as: Ints, budget: PackingBudget
) -> list[Ints]:
    """Packs of the usable users; those that are the same stand together and cost once."""
    kept = np.flatnonzero(usable & (same_as == np.arange(len(same_as))))
    packs = [kept[p] for p in pack_users(prompt_tokens[kept], other_rows[kept], budget)]
    if len(kept) < usable.sum():
        packs = _with_doubles(packs, usable, same_as)
    if sum(len(pack) for pack in packs) != usable.sum():
        raise AccountingError("users were lost when they were packed", do="Nothing was kept.")
    return packs


def _with_doubles(packs: list[Ints], usable: np.ndarray, same_as: Ints) -> list[Ints]:
    """The packs with the users that are the same as one of theirs."""
    users = np.flatnonzero(usable)
    users = users[np.argsort(same_as[users], kind="stable")]
    first = same_as[users]
    lists = []
    for pack in packs:
        begin = np.searchsorted(first, pack, side="left")
        size = np.searchsorted(first, pack, side="right") - begin
        at = Ragged.from_lengths(size, np.empty(0, dtype=np.int64))
        lists.append(users[np.repeat(begin - at.offsets[:-1], size) + np.arange(at.offsets[-1])])
    return lists

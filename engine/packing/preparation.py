"""What a shard becomes before any of it runs: prompts, packs, and users whose work is the same.

`Preparation` is set up once per engine; what it makes of a shard is `Prepared`. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.backend import BackendFacts
from engine.packing.identical import first_of_its_kind
from engine.packing.packs import PackingBudget, pack_users
from engine.prompts.builder import PromptBuilder, PromptSet
from engine.prompts.labels import LabelReader, LabelTokens
from engine.prompts.tokenizer import Tokenizer, bind_space
from engine.trees.candidate_trees import CandidateTrees
from engine.trees.sid_trie import SidTrie
from engine.trees.token_tree import TokenTree
from schemas.errors import AccountingError, EngineError
from schemas.requests import Ints, Ragged, Rejection, UserBatch
from schemas.semantic_ids import ItemTokens, TextTokens
from schemas.settings import RunConfig

_ROWS = 8192  # packed together where memory says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A shard's users with their prompts, and which of them share a pass."""

    users: UserBatch
    prompts: PromptSet
    labels: LabelTokens | None
    tree_rows: Ints  # [U] nodes of each user's token tree
    planned_rows: Ints  # [U] those of them that are forwarded, mostly
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


class Preparation:
    """Prompts and packs of shards."""

    def __init__(
        self,
        config: RunConfig,
        trie: SidTrie | None,
        tokenizer: Tokenizer,
        facts: BackendFacts,
        *,
        labels: LabelReader | None,
        num_soft: int,
    ) -> None:
        """Set up once for all shards.

        Args:
            labels: reads the labels of users, where a task asks for them.
            num_soft: soft tokens of a user vector.

        Raises:
            EngineError: the model does not know the tokens or labels, or its positions are fewer
                than a prompt may need.
        """
        self._task = config.task
        self._label = labels
        self.label_suffix = self._label.suffix if self._label else np.empty(0, dtype=np.int64)
        self.tokens = _item_tokens(config, trie, tokenizer, facts.vocab_size)
        _check_positions(config, trie, len(self.label_suffix), facts.max_positions)
        self._prompts = PromptBuilder(config.prompt, tokenizer, self.tokens, trie, num_soft)
        self._trees: CandidateTrees | None = None
        if trie is not None and self.tokens is not None:
            self._trees = CandidateTrees(
                trie, forward_leaves=self._label is not None, more=len(self.label_suffix)
            )
        rows = config.engine.max_batch_tokens
        self.max_rows = (facts.rows_that_fit or _ROWS) if rows == "auto" else rows
        self._budget = PackingBudget(self.max_rows, config.engine.max_batch_users)
        self._shares_prefix = facts.shares_prefix

    @property
    def trees(self) -> CandidateTrees:
        """Token trees over the catalog."""
        assert self._trees is not None, "a task that needs no items asked for them"
        return self._trees

    def prepare(
        self, users: UserBatch, nodes_per_user: int, nodes_per_tree: int | None = None
    ) -> Prepared:
        """Prompts and packs of a shard; users whose prompt cannot be built are in no pack.

        Args:
            nodes_per_user: nodes that hang from each prompt besides those of candidates.
            nodes_per_tree: of a user's candidates that are forwarded, mostly; None: all.
        """
        prompts = self._prompts.build(users)
        labels = None if self._label is None else self._label.read(users.labels, users.num_users)
        usable = np.ones(users.num_users, dtype=bool)
        usable[[r.user for r in prompts.rejections]] = False
        usable[[r.user for r in labels.rejections] if labels else []] = False
        nodes = np.zeros(users.num_users, dtype=np.int64)
        candidate_tokens, shared_tree = nodes, None
        if users.candidates is not None:
            nodes, shared_tree = self.trees.rows(users.candidates)
            candidate_tokens = self.trees.tokens(users.candidates)
            if not self._task.searches_catalog:
                usable &= users.candidates.scorable > 0  # nothing to do for the others
        planned = nodes if nodes_per_tree is None else np.minimum(nodes, nodes_per_tree)
        rows = planned + nodes_per_user
        same_as = same_work(users, prompts, labels, usable, items=self._task.gives_lists)
        return Prepared(
            users=users,
            prompts=prompts,
            labels=labels,
            tree_rows=nodes,
            planned_rows=planned,
            cost=prompts.lengths + rows,
            candidate_tokens=candidate_tokens,
            shared_tree=shared_tree,
            same_as=same_as,
            packs=pack_distinct(prompts.lengths, rows, usable, same_as, self._budget),
            shared_prefix=len(prompts.static_prefix) if self._shares_prefix else 0,
        )


def _item_tokens(
    config: RunConfig, trie: SidTrie | None, tokenizer: Tokenizer, vocab_size: int
) -> ItemTokens | None:
    """What the codes of the trie are to the model; None where no item is ever named."""
    if config.sid is None:
        return None if trie is None else TextTokens(vocab_size, trie.depth)
    tokens = bind_space(config, tokenizer)
    if tokens.max_token_id >= vocab_size:
        raise EngineError(
            "the model has no embedding for some semantic-ID tokens",
            expected=f"ids below {vocab_size}",
            got=f"id {tokens.max_token_id}",
        )
    return tokens


def _check_positions(
    config: RunConfig, trie: SidTrie | None, suffix: int, max_positions: int
) -> None:
    deep = (trie.depth if trie else 0) + suffix
    if config.prompt.max_tokens + deep > max_positions:
        raise EngineError(
            "prompts may be longer than the model's positions",
            expected=f"prompt.max_tokens + {deep} <= {max_positions}",
            got=f"prompt.max_tokens {config.prompt.max_tokens}",
            do=f"Set prompt.max_tokens to at most {max_positions - deep}.",
        )


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
    if users.k is not None:
        parts.append(users.k)
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

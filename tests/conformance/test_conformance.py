"""What every backend must do, whatever it is inside. conftest.py says how to run it over yours."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from engine.backend import PackedPrompts, TokenColumns
from engine.decoding import Decoding
from engine.generate.beam_search import beam_search
from engine.generate.native_beams import NativeBackend, search_natively
from engine.generate.search import search
from engine.prompts.labels import LabelTokens
from engine.scoring.items import score_in_parts, score_items
from engine.scoring.labels import label_items
from engine.scoring.ranking import rank_candidates
from engine.trees.device_trie import to_device
from engine.trees.exclusions import dead_nodes
from engine.trees.sid_trie import build_trie
from engine.trees.token_tree import build_token_tree
from schemas.requests import Ragged
from schemas.semantic_ids import TextTokens
from schemas.settings import GenerateSettings
from tests.engine.oracle import Oracle
from tests.factories import bound_space, prompts_of, random_codes, random_prompts

NORMS = ("full_vocab", "sid_range", "level", "trie")
PREFIX = [4, 9, 2]


class Case:
    """A random ragged catalog, prompts and candidate sets over one backend."""

    def __init__(self, subject, seed, norm="full_vocab", items=30):
        self.backend = subject.backend
        rng = np.random.default_rng(seed)
        self.trie = build_trie(random_codes(rng, items, ragged=bool(seed % 2)))
        self.device = self.backend.facts.device
        self.index = to_device(self.trie, bound_space(), norm, self.device)
        self.prompts = random_prompts(rng, 5, longest=20)
        sizes = rng.integers(1, items, len(self.prompts))
        self.sets = [rng.choice(items, n, replace=False).tolist() for n in sizes]

    def score(self, prompts=None, sets=None, prefix=PREFIX, max_rows=1000):
        prompts, sets = prompts or self.prompts, sets or self.sets
        packed = prompts if isinstance(prompts, PackedPrompts) else prompts_of(prompts, prefix)
        tree = build_token_tree(self.trie, Ragged.from_lists(sets))
        context = self.backend.prefill(packed, tree.num_rows)
        return score_items(Decoding(self.backend, context, self.index), tree, max_rows).cpu()

    def beams(self, widths, k, dead=None):
        context = self.backend.prefill(prompts_of(self.prompts, PREFIX), 0)
        at = torch.arange(len(self.prompts), device=self.device)
        return beam_search(
            Decoding(self.backend, context, self.index), prompts=at, widths=widths, k=k, dead=dead
        )

    def table(self):
        """Scores of every SID for every prompt."""
        everything = [range(self.trie.num_items)] * len(self.prompts)
        scores = self.score(sets=everything).view(len(self.prompts), -1)
        return scores[:, torch.from_numpy(self.trie.items[self.trie.first_item[:-1]]).long()]


def near(got, want, nats):
    torch.testing.assert_close(got, want, rtol=0, atol=nats)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("seed", range(4))
def test_scores_are_log_probabilities_of_the_model(subject, seed, norm):
    case = Case(subject, seed, norm)
    got = case.score()
    assert (got <= 0).all()
    if subject.model is None:
        return
    oracle = Oracle(subject.model, case.trie, bound_space(), norm)
    want = [
        oracle.score(PREFIX + case.prompts[user], int(case.trie.sid_of_item[item]))
        for user, items in enumerate(case.sets)
        for item in items
    ]
    near(got, torch.tensor(want, dtype=torch.float32), subject.tolerance)


@pytest.mark.parametrize("norm", NORMS)
def test_probabilities_of_the_catalog_never_exceed_one(subject, norm):
    total = Case(subject, 2, norm).table().exp().sum(dim=1)
    assert (total <= 1 + 1e-4).all()
    if norm == "trie":
        near(total, torch.ones_like(total), 1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_company_order_and_chunks_change_nothing(subject, seed):
    case = Case(subject, seed)
    want = case.score()
    alone = [case.score([p], [s]) for p, s in zip(case.prompts, case.sets, strict=True)]
    near(torch.cat(alone), want, subject.same)
    backwards = case.score(case.prompts[::-1], case.sets[::-1])
    parts = backwards.split([len(s) for s in case.sets[::-1]])
    near(torch.cat(parts[::-1]), want, subject.same)
    near(case.score(max_rows=3), want, subject.same)
    mixed = [list(reversed(s)) for s in case.sets]
    flipped = [part.flip(0) for part in case.score(sets=mixed).split([len(s) for s in mixed])]
    near(torch.cat(flipped), want, subject.same)


@pytest.mark.parametrize("max_rows", [1, 7, 40])
def test_candidate_sets_of_any_size_are_scored_in_parts_over_one_prefill(subject, max_rows):
    case = Case(subject, 3)
    candidates = Ragged.from_lists(case.sets)
    context = case.backend.prefill(prompts_of(case.prompts, PREFIX), max_rows)
    got, rows = score_in_parts(Decoding(case.backend, context, case.index), candidates, max_rows)
    near(got.cpu(), case.score(), subject.same)
    assert context.num_rows <= len(case.prompts) + max(max_rows, case.trie.depth)
    assert (rows >= build_token_tree(case.trie, candidates).rows_per_user).all()


@pytest.mark.parametrize("norm", NORMS)
def test_beams_and_candidates_have_one_score(subject, norm):
    case = Case(subject, 1, norm)
    beams, table = case.beams((4, 4, 4), 6), case.table()
    found = beams.score.cpu() > -torch.inf
    near(beams.score.cpu()[found], table.gather(1, beams.sid.cpu())[found], subject.same)


@pytest.mark.parametrize("seed", range(4))
def test_wide_beams_rank_the_whole_catalog(subject, seed):
    case = Case(subject, seed)
    table, beams = case.table(), case.beams((1000, 1000, 1000), 1000)
    assert (beams.pruned.cpu() == -torch.inf).all()
    order = table.argsort(dim=1, descending=True, stable=True)
    near(beams.score.cpu()[:, : case.trie.num_sids], table.gather(1, order), subject.same)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("seed", range(3))
def test_a_best_first_search_finds_the_best_of_the_catalog(subject, seed, norm):
    """Nodes of mixed lengths in one call, hung from rows of earlier calls."""
    case = Case(subject, seed, norm)
    table, k = case.table(), min(5, case.trie.num_sids)
    context = case.backend.prefill(prompts_of(case.prompts, PREFIX), 0)
    found, failed, _ = search(
        Decoding(case.backend, context, case.index),
        GenerateSettings(exact=True),
        widths=(4, 4, 4),
        k=k,
    )
    assert not failed.any() and (found.pruned == -np.inf).all()
    score = torch.from_numpy(found.score).view(len(case.prompts), k)
    near(score, table.topk(k, dim=1).values, subject.same)
    sid = torch.from_numpy(found.sid).view(len(case.prompts), k)
    near(score, table.gather(1, sid), subject.same)


@pytest.mark.parametrize("norm", NORMS)
def test_the_best_candidates_are_found_without_scoring_all(subject, norm):
    case = Case(subject, 3, norm)
    lists, every = Ragged.from_lists(case.sets), case.score()
    context = case.backend.prefill(prompts_of(case.prompts, PREFIX), 0)
    found = rank_candidates(
        Decoding(case.backend, context, case.index),
        lists,
        build_token_tree(case.trie, lists),
        k=2,
        max_nodes=1000,
    )
    assert found is not None and not found.failed.any()
    for user, scores in enumerate(every.split([len(s) for s in case.sets])):
        mine = torch.from_numpy(found.scored.score[found.scored.user == user])
        best = scores.sort(descending=True).values
        near(mine.sort(descending=True).values, best[: len(mine)], subject.same)
        assert len(mine) >= min(2, len(scores))


@pytest.mark.parametrize("seed", range(6))
def test_a_certificate_is_never_wrong(subject, seed):
    case = Case(subject, seed, NORMS[seed % 4])
    excluded = Ragged.from_lists([s[: len(s) // 2] for s in case.sets])
    dead = torch.from_numpy(dead_nodes(case.trie, excluded)).to(case.device)
    beams, table = case.beams((2, 3, 3), 3, dead), case.table()
    for user in range(len(case.prompts)):
        gone = set(excluded.row(user).tolist())
        first = case.trie.first_item
        members = [set(case.trie.items[a:b].tolist()) for a, b in itertools.pairwise(first)]
        alive = [sid for sid, items in enumerate(members) if items - gone]
        score, pruned = beams.score.cpu()[user], float(beams.pruned[user])
        sids = beams.sid.cpu()[user][score > -torch.inf].tolist()
        assert set(sids) <= set(alive)
        assert len(set(sids)) == len(sids)
        if float(score[-1]) > pruned or pruned == -np.inf:
            best = sorted((float(table[user, s]) for s in alive), reverse=True)[:3]
            near(score[score > -torch.inf], torch.tensor(best), subject.same)


def test_vectors_belong_to_their_user(subject):
    """The same tokens with other vectors are other prompts; with the same vector, the same one."""
    case = Case(subject, 2)
    width = subject.backend.facts.hidden_size or 8
    vectors = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    packed = dataclasses.replace(
        prompts_of([[3, 0, 5]] * 3, PREFIX),
        soft_positions=np.asarray([1, 4, 7]),
        soft_vectors=torch.stack([vectors[0], vectors[1], vectors[0]]).to(case.device),
    )
    everything = [range(case.trie.num_items)] * 3
    got = case.score(packed, everything).view(3, -1)
    assert (got[0] - got[1]).abs().max() > 1e-3
    near(got[0], got[2], subject.same)
    plain = case.score([[3, 0, 5]] * 3, everything).view(3, -1)
    assert (got[0] - plain[0]).abs().max() > 1e-3
    near(case.score(packed, everything).view(3, -1), got, 0.0)


def test_any_id_below_the_vocabulary_is_accepted_and_facts_are_filled(subject):
    facts = subject.backend.facts
    assert facts.vocab_size > bound_space().max_token_id
    assert facts.max_positions > 0
    last = prompts_of([[facts.vocab_size - 1]])
    case = Case(subject, 0)
    assert case.score(last, [[0, 1]]).isfinite().all()


class TextCase(Case):
    """Items named by up to five tokens; some are the beginning of others."""

    def __init__(self, subject, seed, items=20):
        super().__init__(subject, seed, items=items)
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 4, (items, 5)).astype(np.int32)
        codes[np.arange(5) >= rng.integers(1, 6, items)[:, None]] = -1
        self.trie = build_trie(codes, prefixes=True)
        self.tokens = TextTokens(self.backend.facts.vocab_size, self.trie.depth)
        self.index = to_device(self.trie, self.tokens, "full_vocab", self.device)

    def labels(self, sets, *, softmax, max_rows=1000):
        """Labels of ids 2, 7 and 9 behind each item and a suffix."""
        context = self.backend.prefill(prompts_of(self.prompts, PREFIX), 0)
        return label_items(
            Decoding(self.backend, context, self.index),
            Ragged.from_lists(sets),
            LabelTokens(
                Ragged.from_lists([[0, 1, 2]] * len(sets)), TokenColumns(np.asarray([2, 7, 9])), []
            ),
            suffix=np.asarray([5, 6]),
            softmax=softmax,
            max_rows=max_rows,
        )[0].cpu()


@pytest.mark.parametrize("seed", range(3))
def test_texts_are_scored_by_their_tokens(subject, seed):
    case = TextCase(subject, seed)
    got = case.score()
    assert (got <= 0).all()
    near(case.score(max_rows=4), got, subject.same)
    if subject.model is None:
        return
    oracle = Oracle(subject.model, case.trie, case.tokens, "full_vocab")
    pairs = [(u, int(case.trie.sid_of_item[i])) for u, s in enumerate(case.sets) for i in s]
    want = [oracle.score(PREFIX + case.prompts[user], sid) for user, sid in pairs]
    near(got, torch.tensor(want, dtype=torch.float32), subject.tolerance)


@pytest.mark.parametrize("softmax", [True, False])
def test_labels_are_read_behind_each_item_alone(subject, softmax):
    case = TextCase(subject, 1)
    got = case.labels(case.sets, softmax=softmax)
    assert (got <= 0).all()
    if softmax:
        near(got.exp().sum(dim=1), torch.ones(len(got)), 1e-5)
    near(case.labels(case.sets, softmax=softmax, max_rows=9), got, subject.same)
    backwards = case.labels([s[::-1] for s in case.sets], softmax=softmax)
    parts = backwards.split([len(s) for s in case.sets])
    near(torch.cat([part.flip(0) for part in parts]), got, subject.same)
    if subject.model is None:
        return
    oracle = Oracle(subject.model, case.trie, case.tokens, "full_vocab")
    pairs = [(u, int(case.trie.sid_of_item[i])) for u, s in enumerate(case.sets) for i in s]
    want = [
        oracle.labels(PREFIX + case.prompts[user], sid, [5, 6], [2, 7, 9], softmax=softmax)
        for user, sid in pairs
    ]
    near(got, torch.tensor(want, dtype=torch.float32), subject.tolerance)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_belong_to_their_prompt(subject, pooling):
    case = Case(subject, 2)
    got = case.backend.embed(prompts_of(case.prompts, PREFIX), pooling).cpu()
    assert got.shape == (len(case.prompts), case.backend.facts.embedding_width)
    assert got.dtype == torch.float32
    assert got.isfinite().all()
    backwards = case.backend.embed(prompts_of(case.prompts[::-1], PREFIX), pooling).cpu()
    near(backwards.flip(0), got, subject.same)
    assert (got[0] - got[1]).abs().max() > 1e-3
    if subject.model is None:
        return
    oracle = Oracle(subject.model, case.trie, bound_space(), "full_vocab")
    want = np.stack([oracle.embed(PREFIX + prompt, pooling) for prompt in case.prompts])
    near(got, torch.from_numpy(want), subject.tolerance)


class NativeCase:
    """Beams of an engine's own search, and a catalog that holds every second one of them."""

    def __init__(self, subject, packed, prompts):
        if not isinstance(subject.backend, NativeBackend):
            pytest.skip("this backend has no beam search of its own")
        self.backend, self.prompts = subject.backend, prompts
        self.backend.start_beams(width=8, steps=3, prompt_tokens=32)
        self.context = self.backend.prefill(packed, 0)
        raw = self.backend.native_beams(self.context)
        assert not raw.failed.any()
        codes = np.unique(raw.tokens.reshape(-1, 3)[::2], axis=0).astype(np.int32)
        self.trie = build_trie(codes)
        self.tokens = TextTokens(self.backend.facts.vocab_size, 3)
        self.index = to_device(self.trie, self.tokens, "full_vocab", self.backend.facts.device)

    def beams(self, *, rescore):
        return search_natively(
            Decoding(self.backend, self.context, self.index),
            GenerateSettings(mode="native", width=8, rescore=rescore),
            k=8,
            max_rows=1000,
        )


def test_native_beams_have_the_scores_of_candidates(subject):
    prompts = [[3, 1, 4], [15, 9, 2, 6]]
    case = NativeCase(subject, prompts_of(prompts, PREFIX), prompts)
    native, failed, counts = case.beams(rescore=False)
    assert not failed.any()
    assert counts.beams == 16
    assert len(native.sid) >= 8
    again, _, _ = case.beams(rescore=True)
    found, forced = (
        {(u, s): score for u, s, score in zip(b.user, b.sid, b.score, strict=True)}
        for b in (native, again)
    )
    assert set(found) == set(forced)
    limit = max(subject.same, subject.tolerance)  # two engines, with kernels of their own
    for key, score in found.items():
        assert abs(score - forced[key]) <= limit
    oracle = Oracle(subject.model, case.trie, case.tokens, "full_vocab")
    for (user, sid), score in found.items():
        assert abs(score - oracle.score(PREFIX + prompts[user], int(sid))) <= subject.tolerance


def test_native_beams_belong_to_the_vector_of_their_user(subject):
    """Users with the same tokens and other vectors, at once and one after another."""
    width = subject.backend.facts.hidden_size
    vectors = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    packed = dataclasses.replace(
        prompts_of([[3, 0, 5]] * 2, PREFIX),
        soft_positions=np.asarray([1, 4]),
        soft_vectors=vectors.to(subject.backend.facts.device),
    )
    case = NativeCase(subject, packed, [[3, 0, 5]] * 2)
    both = -np.sort(-case.backend.native_beams(case.context).score)
    swapped = dataclasses.replace(packed, soft_vectors=packed.soft_vectors.flip(0))
    other = -np.sort(-case.backend.native_beams(case.backend.prefill(swapped, 0)).score)
    assert np.abs(both - other[::-1]).max() <= max(subject.same, 1e-4)
    assert np.abs(both[0] - both[1]).max() > 1e-3

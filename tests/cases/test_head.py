"""CASES A13 and A14: the vocabulary is large, what is asked of it is small."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from engine.backend import Norm, Targets, TokenColumns
from engine.backends.torch.head import Head
from tests.cases.helpers import OpRecorder, index_of, pack, score, search
from tests.factories import SIZES

VOCAB, ROWS, HIDDEN = 151_936, 2_100, 4


@pytest.fixture(scope="module")
def wide_head():
    """A head over 151,936 tokens, and the hidden states of 2,100 rows."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    return head, torch.randn(ROWS, HIDDEN, generator=generator)


@torch.inference_mode()
def test_rows_times_vocabulary_never_exists(wide_head):
    """A13, vllm #5907, #38830, sglang #2607, #31498: out of memory for [rows, vocab] in fp32."""
    head, hidden = wide_head
    asked = np.asarray([5, 70_000, 151_935])
    row = torch.arange(ROWS).repeat_interleave(3)
    targets = Targets(row=row, column=torch.arange(3).repeat(ROWS), columns=TokenColumns(asked))
    with OpRecorder() as recorder:
        got = (
            Head(head, independent=False)
            .log_probs(hidden, targets, Norm("full_vocab"))
            .view(ROWS, 3)
        )
    assert recorder.largest * 4 <= 128 << 20, "at most 128 MiB of logits at once"
    assert recorder.largest * 9 < ROWS * VOCAB
    some = [0, 2047, 2048, ROWS - 1]  # also at the seams of the chunks
    want = torch.log_softmax(hidden[some].double() @ head.weight.double().T, dim=-1)[:, asked]
    np.testing.assert_allclose(got[some], want, rtol=0, atol=1e-5)
    assert not got.isnan().any()


@torch.inference_mode()
def test_only_the_asked_ids_of_the_read_rows_meet_the_head(wide_head):
    """A14, vllm #9404: log p of three tokens cost the whole vocabulary at every position."""
    head, hidden = wide_head
    asked = TokenColumns(np.asarray([9, 10, 11]))
    rows = hidden[:5]
    targets = Targets(row=torch.arange(5), column=torch.tensor([0, 1, 2, 1, 0]), columns=asked)
    with OpRecorder(watch=head.weight) as recorder:
        got = Head(head, independent=False).log_probs(rows, targets, Norm("level", asked))
    want = torch.log_softmax(rows.double() @ head.weight[9:12].double().T, dim=-1)
    np.testing.assert_allclose(got, want[torch.arange(5), targets.column], rtol=0, atol=1e-5)
    assert set(recorder.met) == {(5, 3)}


@pytest.mark.parametrize("norm", ["trie", "level", "full_vocab"])
def test_only_rows_that_are_read_go_through_the_head(norm, torch_backend):
    """A14: a prompt of 40 tokens and five candidates; prompt positions are never read."""
    codes = [[0, 0, 1], [0, 0, 4], [0, 2, 3], [3, 1, 0], [4, 3, 5]]
    _, index = index_of(codes, norm)
    head = torch_backend._head._weight  # the parameter whose memory is watched
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, 20, 40)]
    with OpRecorder(watch=head) as recorder:
        score(torch_backend, index, pack([prompt]), [range(5)])
    # Rows that predict something: the prompt's end, three first codes, four prefixes of two.
    asked = [(1, SIZES[0]), (3, SIZES[1]), (4, SIZES[2])]
    met = {
        "trie": asked,
        "level": asked + asked,  # its normaliser too
        "full_vocab": [(8, sum(SIZES)), (8, head.shape[0])],  # rows of all depths in one call
    }[norm]
    assert sorted(recorder.met) == sorted(met)


def test_a_beam_step_reads_its_beams_and_nothing_else(torch_backend):
    """A14: width 2 and two users; each level reads the beams of the level before."""
    codes = [[a, b, c] for a in range(5) for b in range(4) for c in range(6)]
    _, index = index_of(codes, "trie")
    with OpRecorder(watch=torch_backend._head._weight) as recorder:
        search(torch_backend, index, pack([[3, 1, 4, 1, 5], [9, 2]]), width=2, k=3)
    assert recorder.met == [(2, SIZES[0]), (4, SIZES[1]), (4, SIZES[2])]

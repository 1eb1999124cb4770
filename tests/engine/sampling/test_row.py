"""Token counts of a sequence, and the edits of its logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.engine.sampling.row import (
    RowSampling,
    TokenCounts,
    check_logit_bias,
    edits_of,
    has_penalties,
)
from luceasync.errors import RequestError
from luceasync.ranking.local import apply_edits
from luceasync.request import Sampling
from tests.reference import sampler as slow

VOCAB = 60
PROMPT_IDS = (3, 7, 7, 11)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 99)), st.lists(st.integers(0, 99), max_size=300))
def test_counts_hold_each_token_once(prompt_ids, generated_ids):
    counts = TokenCounts(prompt_ids)
    for token_id in generated_ids:
        counts.add(token_id)
    seen = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert len(counts.ids) == len(seen)
    assert seen == {t: generated_ids.count(t) for t in {*prompt_ids, *generated_ids}}
    assert all(counts.count(t) == generated_ids.count(t) for t in range(101))


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_a_bias_outside_the_vocabulary_is_refused(token_id):
    check_logit_bias(Sampling(logit_bias={0: 1.0, VOCAB - 1: 1.0}), VOCAB)
    with pytest.raises(RequestError, match=f"token {token_id}; .* 0 to 59") as refused:
        check_logit_bias(Sampling(logit_bias={token_id: 1.0}), VOCAB)
    assert refused.value.param == "logit_bias"


# --- edits ----------------------------------------------------------------------------------------


VOCAB = 60
PROMPT_IDS = (3, 7, 7, 11)
GENERATED_IDS = (7, 20, 20, 20, 5)

samplings = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    logit_bias=st.dictionaries(st.sampled_from([3, 7, 20, 40]), st.sampled_from([-100.0, 3.0])),
)


def edited(logits: torch.Tensor, rows: list[RowSampling]) -> torch.Tensor:
    return apply_edits(logits, edits_of(rows))


def row_of(sampling: Sampling) -> RowSampling:
    counts = TokenCounts(PROMPT_IDS)
    for token_id in GENERATED_IDS:
        counts.add(token_id)
    return RowSampling(sampling, seed=0, position=0, counts=counts)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(samplings, min_size=1, max_size=4), st.integers(0, 99))
def test_each_row_gets_the_edits_of_the_slow_truth(wanted: list[Sampling], seed: int):
    logits = torch.randn(len(wanted), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    before = logits.tolist()
    found = edited(logits, [row_of(sampling) for sampling in wanted])
    for row, sampling, raw in zip(found.tolist(), wanted, before, strict=True):
        assert row == slow.edit_logits(raw, sampling, PROMPT_IDS, GENERATED_IDS)
    assert logits.tolist() == before


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(samplings, min_size=1, max_size=3),
    st.lists(st.lists(st.sampled_from([3, 7, 20, 40, 50]), max_size=4), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_rows_of_a_proposal_get_the_edits_of_what_stands_above_them(wanted, lines, seed):
    rows = [
        replace(row, following=tuple(line) if has_penalties(row.sampling) else ())
        for row in map(row_of, wanted)
        for line in lines
    ]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    found = edited(logits, rows)
    for had, row, raw in zip(found.tolist(), rows, logits.tolist(), strict=True):
        generated = (*GENERATED_IDS, *row.following)
        assert had == slow.edit_logits(raw, row.sampling, PROMPT_IDS, generated)


def test_unedited_logits_are_not_copied():
    logits = torch.zeros(2, VOCAB)
    assert edited(logits, [row_of(Sampling(temperature=1.0))] * 2) is logits


def test_repetition_counts_the_prompt_and_presence_does_not():
    logits = torch.zeros(2, VOCAB)
    logits[:, 3], logits[:, 40] = 2.0, 1.9  # 3 is in the prompt only
    rows = [row_of(Sampling(repetition_penalty=1.2)), row_of(Sampling(presence_penalty=1.0))]
    assert edited(logits, rows).argmax(-1).tolist() == [40, 3]

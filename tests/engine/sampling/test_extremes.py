"""No value of a sampling field, alone or beside another's, is more than one row's trouble."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.engine.sampling.row import RowSampling, TokenCounts
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import NO_TOKEN
from luceasync.request import Sampling
from tests.chosen import ChosenTokens
from tests.chosen import choose as choose_from

VOCAB = 300
SMALLEST, LARGEST = 5e-324, 1e300  # float32 makes 0 and infinity of them
BIASES = ({}, {0: 100.0}, dict.fromkeys(range(VOCAB), -100.0), {7: LARGEST}, {7: -LARGEST})
EXTREMES = {
    "temperature": (0.0, SMALLEST, 1e-40, 1e-6, 1e-5, 2.0, LARGEST),
    "top_k": (0, 1, VOCAB - 1, VOCAB, 2**31 - 1),
    "top_p": (SMALLEST, 1e-40, 1 - 2**-53, 1.0),
    "min_p": (0.0, SMALLEST, 0.05, 1.0),
    "repetition_penalty": (SMALLEST, 1e-40, 0.01, 100.0, LARGEST),
    "frequency_penalty": (-LARGEST, -2.0, 2.0, LARGEST),
    "presence_penalty": (-LARGEST, -2.0, 2.0, LARGEST),
    "logit_bias": BIASES,
    "seed": (-(2**63), 0, 2**63 - 1),
}
SAMPLINGS = [
    replace(Sampling(temperature=1.0), **{one: this, other: that})
    for one, other in itertools.combinations(EXTREMES, 2)
    for this in EXTREMES[one]
    for that in EXTREMES[other]
]
BYSTANDER = RowSampling(Sampling(temperature=0.8, top_p=0.9), seed=4, position=9)


def choose(logits: torch.Tensor, rows, **how) -> ChosenTokens:
    return choose_from(LocalLogits(logits), rows, **how)


def row_of(sampling: Sampling, **extra) -> RowSampling:
    counts = TokenCounts(range(50))
    for token_id in range(40, 90):
        counts.add(token_id)
    return RowSampling(sampling, sampling.seed or 3, 5, counts, **extra)


def logits_of(seed: int, spread: float) -> torch.Tensor:
    return torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def test_every_field_has_extremes():
    assert EXTREMES.keys() == {field.name for field in fields(Sampling)}


@pytest.mark.slow
@pytest.mark.parametrize("num_candidates", [16, 1024])
def test_a_pair_of_extremes_gives_a_token_or_none_and_touches_no_other_row(num_candidates):
    logits = logits_of(0, spread=10.0)
    alone = choose(logits[1:], [BYSTANDER]).token_ids
    for sampling in SAMPLINGS:
        chosen = choose(logits, [row_of(sampling), BYSTANDER], num_candidates=num_candidates)
        assert chosen.token_ids[1:] == alone, sampling
        assert NO_TOKEN <= chosen.token_ids[0] < VOCAB, sampling


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.builds(Sampling, **{name: st.sampled_from(values) for name, values in EXTREMES.items()}),
    st.integers(0, 99),
    st.sampled_from([0.0, 1e-30, 1.0, 1e4, 1e37]),
    st.sampled_from([None, 0, 20]),
)
def test_any_extremes_together_end_one_row_at_most(sampling, seed, spread, top_logprobs):
    rows = [row_of(sampling, top_logprobs=top_logprobs), BYSTANDER]
    chosen = choose(logits_of(seed, spread), rows, num_candidates=16)
    assert NO_TOKEN <= chosen.token_ids[0] < VOCAB
    assert 0 <= chosen.token_ids[1] < VOCAB


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_logprobs", [None, 2])
def test_a_row_without_a_finite_peak_has_no_token(value, temperature, top_logprobs):
    logits = logits_of(1, spread=1.0)
    logits[0] = value
    sampling = Sampling(temperature=temperature, min_p=0.05)
    chosen = choose(logits, [row_of(sampling, top_logprobs=top_logprobs), BYSTANDER])
    assert chosen.token_ids == [NO_TOKEN, *choose(logits[1:], [BYSTANDER]).token_ids]


def test_a_temperature_of_nothing_is_greedy():
    logits = logits_of(2, spread=1.0)[:1]
    [greedy] = choose(logits, [row_of(Sampling())]).token_ids
    for temperature in (SMALLEST, 1e-40, 9e-6):
        assert choose(logits, [row_of(Sampling(temperature=temperature))]).token_ids == [greedy]


@pytest.mark.parametrize("top_k", [4500, 5999, 6000, 2**31 - 1])  # too many to rank for all rows
def test_a_large_top_k_draws_as_from_the_whole_order(top_k):
    logits = torch.randn(2, 6000, generator=torch.Generator().manual_seed(3))
    rows = [RowSampling(Sampling(temperature=1.0, top_k=top_k), 5, i) for i in range(2)]
    whole = choose(logits, rows, num_candidates=6000)
    assert choose(logits, rows, num_candidates=16) == whole

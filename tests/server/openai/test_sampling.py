"""Fields by which tokens are chosen: absent ones mean what OpenAI says, the others have a range."""

from __future__ import annotations

import itertools

import pytest
import torch

from luceasync.engine.sampling.choose import choose
from luceasync.engine.sampling.row import RowSampling, TokenCounts
from luceasync.errors import RequestError
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import NO_TOKEN
from luceasync.request import Sampling
from luceasync.server.openai.request_body import SamplingBody, num_choices_of, sampling_of, stops_of

VOCAB = 100


def test_absent_fields_are_openais_defaults():
    body = SamplingBody()
    assert sampling_of(body) == Sampling(temperature=1.0)
    assert (stops_of(body), num_choices_of(body)) == ((), 1)


def test_every_field_arrives():
    fields = {
        "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "frequency_penalty": -2.0, "presence_penalty": 2.0, "seed": -7,
    }  # fmt: skip
    sampling = sampling_of(SamplingBody(**fields, logit_bias={"17": -100.0}))
    assert sampling == Sampling(**fields, logit_bias={17: -100.0})


def test_top_k_minus_one_is_off():
    assert sampling_of(SamplingBody(top_k=-1)).top_k == 0


@pytest.mark.parametrize(("stop", "stops"), [("a", ("a",)), (["a", "b"], ("a", "b"))])
def test_one_stop_string_needs_no_list(stop, stops):
    assert stops_of(SamplingBody(stop=stop)) == stops


@pytest.mark.parametrize(
    "body",
    [
        SamplingBody(temperature=2.1),
        SamplingBody(top_p=0.0),
        SamplingBody(repetition_penalty=0.0),
        SamplingBody(repetition_penalty=1e-40),
        SamplingBody(repetition_penalty=100.1),
        SamplingBody(seed=2**63),
        SamplingBody(logit_bias={"x": 1.0}),
        SamplingBody(logit_bias={"5": 101.0}),
    ],
)
def test_a_value_out_of_range_is_refused(body):
    with pytest.raises(RequestError, match="expected"):
        sampling_of(body)


RANGES = {
    "temperature": (0.0, 5e-324, 2.0),
    "top_k": (-1, 0, 1, 2**31 - 1),
    "top_p": (5e-324, 1.0),
    "min_p": (0.0, 5e-324, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "logit_bias": ({str(i): -100.0 for i in range(VOCAB)}, {"3": 100.0}),
}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(RANGES, 2)))
def test_what_is_let_in_can_be_drawn(one, other):
    """The ends of the ranges, in pairs, after many tokens."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 1000.0
    counts = TokenCounts(range(VOCAB // 2))
    for _ in range(300):
        counts.add(3)
    for this, that in itertools.product(RANGES[one], RANGES[other]):
        sampling = sampling_of(SamplingBody(**{one: this, other: that}))
        [token] = choose(LocalLogits(logits), [RowSampling(sampling, 1, 2, counts)]).token_ids
        assert token != NO_TOKEN, sampling

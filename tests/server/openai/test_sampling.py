"""Fields by which tokens are chosen: absent ones mean what OpenAI says, the others have a range."""

from __future__ import annotations

import pytest

from luceasync.errors import RequestError
from luceasync.request import Sampling
from luceasync.server.openai.sampling import SamplingBody, num_choices_of, sampling_of, stops_of


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
        SamplingBody(seed=2**63),
        SamplingBody(logit_bias={"x": 1.0}),
        SamplingBody(logit_bias={"5": 101.0}),
    ],
)
def test_a_value_out_of_range_is_refused(body):
    with pytest.raises(RequestError, match="expected"):
        sampling_of(body)

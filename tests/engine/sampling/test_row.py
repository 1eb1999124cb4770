"""How often a sequence holds each token, and which biases can be asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.engine.sampling.row import TokenCounts, check_logit_bias
from luceasync.errors import RequestError
from luceasync.request import Sampling

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

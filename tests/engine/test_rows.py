"""How often a sequence holds each token, and which biases can be asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.engine.rows import TokenCounts, check_logit_bias
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


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_a_bias_outside_the_vocabulary_is_refused(token_id):
    check_logit_bias(Sampling(logit_bias={0: 1.0, VOCAB - 1: 1.0}), VOCAB)
    with pytest.raises(RequestError, match=f"token {token_id}; .* 0 to 59") as refused:
        check_logit_bias(Sampling(logit_bias={token_id: 1.0}), VOCAB)
    assert refused.value.param == "logit_bias"


def test_counts_of_what_may_follow_leave_the_counts_alone():
    counts = TokenCounts(PROMPT_IDS)
    counts.add(7)
    later = counts.followed_by([7, 50, 50, 3])
    found = dict(zip(later.ids.tolist(), later.counts.tolist(), strict=True))
    assert found == {3: 1, 7: 2, 11: 0, 50: 2}
    assert (later.slot(50), counts.slot(50)) == (3, None)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        3: 0,
        7: 1,
        11: 0,
    }

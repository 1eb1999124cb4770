"""Prefill and decode share the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.engine.scheduler import Balance, Load, next_prefill, next_step


@pytest.mark.parametrize(
    ("num_prefilling", "num_decoding", "prefill_s", "decode_s", "expected"),
    [
        (0, 0, 0.0, 0.0, "idle"),
        (1, 0, 9.0, 0.0, "prefill"),
        (0, 1, 0.0, 9.0, "decode"),
        (1, 1, 0.0, 0.0, "prefill"),
        (1, 1, 1.0, 0.9, "decode"),
        (1, 1, 1.0, 1.0, "prefill"),
        (5, 1, 1.0, 1.1, "prefill"),
        (1, 5, 1.0, 0.9, "decode"),
    ],
)
def test_next_step(num_prefilling, num_decoding, prefill_s, decode_s, expected):
    assert next_step(Load(num_prefilling, num_decoding, prefill_s, decode_s)) == expected


@given(chunk_s=st.floats(0.01, 2.0), token_s=st.floats(0.01, 2.0))
def test_neither_gets_ahead_by_more_than_one_step(chunk_s: float, token_s: float):
    spent = {"prefill": 0.0, "decode": 0.0}
    for _ in range(100):
        step = next_step(Load(1, 1, spent["prefill"], spent["decode"]))
        spent[step] += chunk_s if step == "prefill" else token_s
        ahead = spent["prefill"] - spent["decode"]
        assert -token_s - 1e-9 <= ahead <= chunk_s + 1e-9


def test_while_both_wait_each_has_its_share_and_a_time_alone_counts_for_nothing():
    balance = Balance()
    balance.account("prefill", 9.0, both=False)
    assert balance.next_step(1, 1) == "prefill"
    balance.account("prefill", 2.0, both=True)
    for _ in range(2):
        assert balance.next_step(1, 1) == "decode"
        balance.account("decode", 1.0, both=True)
    assert balance.next_step(1, 1) == "prefill"


def test_of_prompts_that_one_comes_first_which_somebody_reads_already():
    assert next_prefill([False, False, True, True]) == 2
    assert next_prefill([False, False]) == 0

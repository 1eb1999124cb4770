"""Prefill and decode share the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.engine.scheduling import Balance, Load, next_step


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


def test_what_opens_an_answer_waits_for_one_step_and_others_then_for_what_is_owed():
    balance = Balance()
    balance.account("prefill", 5.0, both=True)
    assert balance.next_step(1, 1, is_opening=True) == "decode"
    balance.account("decode", 1.0, both=True)
    assert balance.next_step(1, 1) == "decode"
    assert balance.next_step(1, 1, is_opening=True) == "prefill"
    balance.account("prefill", 1.0, both=True)
    for _ in range(5):  # 4 of the first chunk, 1 of this one
        assert balance.next_step(1, 1) == "decode"
        balance.account("decode", 1.0, both=True)
    assert balance.next_step(1, 1) == "prefill"


def test_what_opens_an_answer_and_is_all_there_is_to_run_waits_for_nothing():
    assert Balance().next_step(1, 1, is_opening=True) == "prefill"


@given(st.lists(st.tuples(st.booleans(), st.floats(0.01, 2.0)), min_size=1, max_size=60))
def test_openings_take_nothing_from_the_share_of_streams(chunks: list[tuple[bool, float]]):
    balance, spent = Balance(), {"prefill": 0.0, "decode": 0.0}
    for is_opening, seconds in chunks:
        while (step := balance.next_step(1, 1, is_opening=is_opening)) == "decode":
            balance.account("decode", 0.1, both=True)
            spent["decode"] += 0.1
        if not is_opening:
            assert spent["decode"] >= spent["prefill"] - 1e-6
        balance.account(step, seconds, both=True)
        spent["prefill"] += seconds

"""A call may take much longer than its like has taken, and those whose like is unknown longest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.ipc.supervised import FIRST_S, LEAST_S, NUM_FIRST, CallKind, CallDeadlines, CallTimes, deadline_s

SECONDS = st.floats(0.0, 1e4)


@pytest.mark.parametrize(
    ("took_s", "expected_s"),
    [
        ([], FIRST_S),
        ([0.001] * (NUM_FIRST - 1), FIRST_S),  # kernels may be compiled yet
        ([0.001] * NUM_FIRST, LEAST_S),
        ([4.0, 0.1, 0.1], 80.0),
        ([40.0, 0.1, 0.1], FIRST_S),
    ],
)
def test_the_slowest_one_so_far_says_it(took_s, expected_s):
    seen = CallTimes()
    for seconds in took_s:
        seen = seen.after(seconds)
    assert deadline_s(seen) == expected_s


@given(st.lists(SECONDS), SECONDS)
def test_a_slower_call_never_shortens_it_once_they_are_known(took_s, seconds):
    seen = CallTimes(NUM_FIRST, 0.0)
    for each in took_s:
        seen = seen.after(each)
    assert LEAST_S <= deadline_s(seen) <= deadline_s(seen.after(seconds)) <= FIRST_S


def test_calls_of_another_kind_or_size_say_nothing():
    pace = CallDeadlines()
    for _ in range(NUM_FIRST):
        pace.took(CallKind("prefill", 512), 0.1)
    assert pace.deadline_s(CallKind("prefill", 300)) == LEAST_S
    for other in (CallKind("prefill", 513), CallKind("prefill", 256), CallKind("decode", 512)):
        assert pace.deadline_s(other) == FIRST_S
    assert (pace.num_calls, pace.seconds) == (NUM_FIRST, pytest.approx(0.3))

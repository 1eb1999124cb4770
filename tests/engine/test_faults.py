"""When an engine that fails again and again gives up, and what clients are told."""

from __future__ import annotations

import re

import pytest

from luceasync.engine.faults import MAX_IN_A_ROW, SOUND_LIFE_S, Failures, Restarts, fault_of
from luceasync.errors import ModelError, StageFailed


def test_the_third_failure_in_a_row_is_the_last():
    failures = Failures()
    assert [failures.is_last("decode", 7) for _ in range(MAX_IN_A_ROW)] == [False, False, True]


def test_a_completed_pass_excuses_the_failures_before_it():
    failures = Failures()
    assert not any(failures.is_last("decode", num_completed) for num_completed in range(20))


def test_failures_of_one_kind_are_not_counted_for_another():
    failures = Failures()
    kinds = ["prefill", "decode", "between", "command"]
    assert not any(failures.is_last(kind, 0) for _ in range(MAX_IN_A_ROW - 1) for kind in kinds)
    assert all(failures.is_last(kind, 0) for kind in kinds)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (StageFailed(2, "no answer in 10 s"), "unavailable", "group 2 .* no answer in 10 s"),
        (ZeroDivisionError("no way"), "failed", "the engine failed: ZeroDivisionError: no way"),
        (ModelError("no layer"), "failed", "the engine failed: ModelError: no layer"),
    ],
)
def test_only_a_group_that_failed_may_be_asked_again(error, kind, words):
    fault = fault_of(error, "decode")
    assert fault.kind == kind
    assert re.fullmatch(words, fault.words)


def test_each_restart_that_does_not_last_waits_twice_as_long_up_to_a_minute():
    restarts = Restarts()
    assert [restarts.pause_s(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_after_a_sound_life_a_failure_is_the_first_one():
    restarts = Restarts()
    restarts.pause_s(0.0), restarts.pause_s(0.0)
    assert restarts.pause_s(SOUND_LIFE_S) == 1
    assert restarts.pause_s(SOUND_LIFE_S / 2) == 2

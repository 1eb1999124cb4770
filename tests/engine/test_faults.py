"""When an engine that fails again and again gives up, and what clients are told."""

from __future__ import annotations

import re

import pytest

from luceasync.engine.faults import MAX_IN_A_ROW, Failures, fault_of
from luceasync.errors import GroupFailed, ModelError


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
        (GroupFailed(2, "no answer in 10 s"), "unavailable", "group 2 .* no answer in 10 s"),
        (ZeroDivisionError("no way"), "failed", "the engine failed: ZeroDivisionError: no way"),
        (ModelError("no layer"), "failed", "the engine failed: ModelError: no layer"),
    ],
)
def test_only_a_group_that_failed_may_be_asked_again(error, kind, words):
    fault = fault_of(error, "decode")
    assert fault.kind == kind
    assert re.fullmatch(words, fault.words)

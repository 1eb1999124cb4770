"""Sizes by tier, what a restore reads, and common prefixes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.prefix_tree.node import Match, common_prefix, pack_tokens
from tests.prefix_tree.nodes import BOTH, DISK, MEMORY, make

TOKENS = st.lists(st.integers(0, 2), max_size=20)


@given(TOKENS, TOKENS)
def test_common_prefix_is_where_the_first_difference_is(a: list[int], b: list[int]):
    differences = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    expected = min([*differences, len(a), len(b)])
    assert common_prefix(pack_tokens(a), pack_tokens(b)) == expected


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_a_token_beyond_int32_is_refused(token: int):
    with pytest.raises(OverflowError):
        pack_tokens([token])


def test_a_tier_that_holds_no_state_holds_the_rows_only():
    node = make(None, [1, 2, 3], tiers=BOTH, state_tiers=DISK, state_bytes=100)
    assert (node.bytes_in("memory"), node.bytes_in("disk")) == (30, 130)


def test_a_tier_that_does_not_hold_the_node_holds_nothing():
    assert make(None, [1, 2, 3]).bytes_in("disk") == 0


def test_a_restore_reads_memory_first_and_the_last_state_alone():
    first = make(None, [1] * 4, tiers=DISK, state_tiers=DISK)
    second = make(first, [2] * 3, tiers=BOTH, state_tiers=BOTH)
    match = Match((first, second), None, 7, False, 7, None)
    assert (match.read_bytes("memory"), match.read_bytes("disk")) == (30 + 100, 40)


def test_a_part_reads_its_share_and_no_state():
    first = make(None, [1] * 4, state_tiers=MEMORY)
    part = make(first, [2] * 10, tiers=DISK)
    match = Match((first,), part, 8, False, 9, None)
    assert (match.read_bytes("memory"), match.read_bytes("disk")) == (40, 40)


def test_logits_are_read_where_they_are_needed():
    node = make(None, [1] * 4, logits_tiers=MEMORY)
    assert Match((node,), None, 4, True, 4, None).read_bytes("memory") == 140
    assert Match((node,), None, 4, False, 4, None).read_bytes("memory") == 40

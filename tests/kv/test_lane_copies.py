"""Copies between lanes and host memory; what needs a GPU is in tests/target/test_nodes_gpu.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from luceasync.kv.host import PIECE_BYTES
from luceasync.kv.lane_copies import pieces


@given(st.integers(1, 4 * PIECE_BYTES), st.integers(0, 3 * PIECE_BYTES))
def test_pieces_cover_the_range_and_cross_no_border(address: int, num_bytes: int):
    found = list(pieces(address, num_bytes))
    assert [begin for begin, _ in found] == [0, *[end for _, end in found]][: len(found)]
    assert (found[-1][1] if found else 0) == num_bytes
    for begin, end in found:
        assert (address + begin) // PIECE_BYTES == (address + end - 1) // PIECE_BYTES


def test_a_range_is_cut_at_borders_only():
    assert list(pieces(PIECE_BYTES, PIECE_BYTES)) == [(0, PIECE_BYTES)]
    assert list(pieces(PIECE_BYTES - 3, 10)) == [(0, 3), (3, 10)]

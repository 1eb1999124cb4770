"""How copies are cut; what needs a GPU is in tests/target/test_nodes_gpu.py."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from luceasync.kv.copy_stream import batches, pieces
from luceasync.kv.host import PIECE_BYTES


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


@given(st.lists(st.integers(0, 2 * PIECE_BYTES), max_size=6))
def test_batches_are_the_same_bytes_in_small_amounts(sizes: list[int]):
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    pairs = [(part, part) for part in memory.split(sizes)]
    found = list(batches(pairs))
    assert all(sum(source.numel() for _, source in batch) <= PIECE_BYTES for batch in found)
    at = memory.data_ptr()
    for target, source in (pair for batch in found for pair in batch):
        assert target.data_ptr() == source.data_ptr() == at
        at += source.numel()
    assert at == memory.data_ptr() + sum(sizes)


def test_small_copies_share_a_batch():
    small = torch.empty(64, dtype=torch.uint8)
    assert [len(batch) for batch in batches([(small, small)] * 100)] == [100]

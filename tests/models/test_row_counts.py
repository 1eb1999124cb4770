"""Rows are filled up to few numbers of them, and by little."""

from __future__ import annotations

import pytest

from luceasync.models.row_counts import filled_up


def test_prompts_of_any_length_up_to_4096_make_44_numbers():
    assert len({filled_up(num_rows) for num_rows in range(1, 4097)}) == 44


def test_less_than_a_quarter_is_added():
    assert all(num <= filled_up(num) < 1.25 * num for num in range(1, 4097))


@pytest.mark.parametrize("num_rows", [*range(9), 16, 24, 32, 64, 128, 256, 512])
def test_what_steps_of_decode_and_whole_chunks_have_stays(num_rows: int):
    assert filled_up(num_rows) == num_rows

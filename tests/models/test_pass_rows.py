"""Numbers of rows are rounded up to few values, and by little."""

from __future__ import annotations

import pytest

from luceasync.models.pass_rows import round_up_rows


@pytest.mark.parametrize(("per_octave", "num_numbers"), [(4, 44), (32, 256)])
def test_prompts_of_any_length_up_to_4096_make_few_numbers(per_octave: int, num_numbers: int):
    numbers = {round_up_rows(num_rows, per_octave=per_octave) for num_rows in range(1, 4097)}
    assert len(numbers) == num_numbers


@pytest.mark.parametrize("per_octave", [1, 4, 32])
def test_less_than_the_numbers_part_is_added(per_octave: int):
    for num in range(1, 4097):
        assert num <= round_up_rows(num, per_octave=per_octave) < num * (1 + 1 / per_octave)


@pytest.mark.parametrize("num_rows", [*range(9), 16, 24, 32, 64, 128, 256, 512])
def test_what_steps_of_decode_and_whole_chunks_have_stays(num_rows: int):
    assert round_up_rows(num_rows, per_octave=4) == num_rows

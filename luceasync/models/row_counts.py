"""How many rows an operation is given where each number of them costs: time to compile, and memory.

Pure: numbers in, a number out.
"""

from __future__ import annotations


def filled_up(num_rows: int, *, per_octave: int) -> int:
    """`num_rows`, or as many more as make it one of `per_octave` numbers in each octave, a power of
    two: with 4 of them 8, 10, 12, 14, 16, 20, ... Of the rows less than one part in `per_octave` is
    added.
    """
    step = max(1, (1 << num_rows.bit_length()) // (2 * per_octave))
    return -(-num_rows // step) * step

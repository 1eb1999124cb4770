"""How many rows a product is given where each number of them costs: time to compile, and memory.

Pure: a number in, a number out.
"""

from __future__ import annotations


def filled_up(num_rows: int) -> int:
    """`num_rows`, or as many more as make it one of four numbers in each octave (8, 10, 12, 14, 16,
    20, ...): less than a quarter more.
    """
    step = 1 << max(num_rows.bit_length() - 3, 0)
    return -(-num_rows // step) * step

"""What is loaded stays as long as the process: garbage collections need not look through it."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Leave what is there now out of later garbage collections: looking through it would hold up
    every answer for a tenth of a second now and then.
    """
    gc.collect()
    gc.freeze()

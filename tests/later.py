"""Something that happens while a test waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def later(delay_s: float, act: Callable[..., object], *args: object) -> Iterator[None]:
    """Call `act` in another thread while the block runs; it has returned when the block has ended.

    A timer that is not joined may act on what the next test owns, or on what this one has closed.
    """
    timer = threading.Timer(delay_s, act, args)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextmanager
def otherwise(limit_s: float, act: Callable[..., object], *args: object) -> Iterator[None]:
    """Call `act` in another thread if the block takes longer than `limit_s`."""
    timer = threading.Timer(limit_s, act, args)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()

"""Variants taken in turns, so that whatever else the machine does meets all of them alike.

Owns the order and the clock. Knows no devices (see luceasync.bench.device) and no statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

Run = Callable[[], Any]
Clock = Callable[[Run], float]  # seconds of one run


def interleave(
    variants: Mapping[str, Callable[[], T]], num_rounds: int, *, num_warmups: int = 1
) -> dict[str, list[T]]:
    """What each variant returned in each round, in the order of the rounds; those of the first
    `num_warmups` rounds are thrown away.

    Rounds go there and back: what ran just before a variant is not the same in every round.
    """
    found: dict[str, list[T]] = {name: [] for name in variants}
    for number in range(num_warmups + num_rounds):
        names = list(variants) if number % 2 == 0 else list(variants)[::-1]
        for name in names:
            result = variants[name]()
            if number >= num_warmups:
                found[name].append(result)
    return found


def wall(run: Run) -> float:
    """Seconds of one run by this process's clock."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(
    variants: Mapping[str, Run], num_rounds: int, *, num_warmups: int = 1, clock: Clock = wall
) -> dict[str, list[float]]:
    """Seconds of each variant in each round; see `interleave`."""
    timed = {name: _timed(run, clock) for name, run in variants.items()}
    return interleave(timed, num_rounds, num_warmups=num_warmups)


def _timed(run: Run, clock: Clock) -> Callable[[], float]:
    return lambda: clock(run)

"""Whether it is faster to restore a prefix or to run its tokens again, from measured rates.

Pure: whoever moves the bytes tells how long they took.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

RateName = Literal["disk_bytes_per_s", "bus_bytes_per_s", "prefill_tokens_per_s"]
Reason = Literal["restore_is_faster", "prefill_is_faster", "not_measured"]

_WEIGHT = 0.25  # of the newest observation


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine has shown so far; None: not measured yet. `bus`: host memory to device.
    `fixed_s` is what a restore takes beyond its bytes.
    """

    disk_bytes_per_s: float | None = None
    bus_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    fixed_s: float = 0.0

    def observed(self, rate: RateName, amount: int, elapsed_s: float) -> Rates:
        """The rates after `amount` bytes or tokens took `elapsed_s`.

        The average is one of seconds per unit, for seconds are what is predicted. An amount or a
        time of nothing says nothing.
        """
        if amount <= 0 or elapsed_s <= 0:
            return self
        known: float | None = getattr(self, rate)
        unit_s = elapsed_s / amount
        if known is not None:
            unit_s = _WEIGHT * unit_s + (1 - _WEIGHT) / known
        return replace(self, **{rate: 1 / unit_s})

    def observed_fixed(self, elapsed_s: float) -> Rates:
        """The rates after a restore took `elapsed_s` beyond its bytes."""
        return replace(self, fixed_s=_WEIGHT * max(0.0, elapsed_s) + (1 - _WEIGHT) * self.fixed_s)


@dataclass(frozen=True, slots=True)
class Decision:
    """`restore` or run the tokens again, and the two times that were compared; None: not known."""

    restore: bool
    reason: Reason
    restore_s: float | None
    prefill_s: float | None


def restore_or_prefill(
    num_tokens: int, *, memory_bytes: int, disk_bytes: int, rates: Rates
) -> Decision:
    """Decide about a prefix of `num_tokens` tokens, which is held in `memory_bytes` of memory and
    `disk_bytes` of files. Both cross the bus. A restore that cannot be timed yet is done: it is
    measured by that.
    """
    restore_s = _total_s(
        rates.fixed_s,
        (disk_bytes, rates.disk_bytes_per_s),
        (memory_bytes + disk_bytes, rates.bus_bytes_per_s),
    )
    prefill_s = _total_s(0.0, (num_tokens, rates.prefill_tokens_per_s))
    if restore_s is None or prefill_s is None:
        return Decision(True, "not_measured", restore_s, prefill_s)
    if restore_s <= prefill_s:
        return Decision(True, "restore_is_faster", restore_s, prefill_s)
    return Decision(False, "prefill_is_faster", restore_s, prefill_s)


def _total_s(fixed_s: float, *steps: tuple[int, float | None]) -> float | None:
    """The time of (amount, rate) one after the other, or None if one that matters is not known."""
    total_s = fixed_s
    for amount, rate in steps:
        if amount == 0:
            continue
        if rate is None:
            return None
        total_s += amount / rate
    return total_s

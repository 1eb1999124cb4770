"""Whether it is faster to restore a prefix or to run its tokens again, from measured rates.

Pure: whoever moves the bytes tells how long they took.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

RateName = Literal["disk_bytes_per_s", "bus_bytes_per_s", "prefill_tokens_per_s"]
Reason = Literal["restore_is_faster", "prefill_is_faster", "not_measured"]

_WEIGHT = 0.25  # of the newest observation
_RELIEF = 1.1  # by which a refused way is thought faster next time: it is measured again one day
_PATIENCE = 2.0  # times what running the tokens again takes
_LEAST_PATIENCE_S = 0.5  # a disk that wakes up, or another process that writes a lot
_SLOW_PREFILL_TOKENS_PER_S = 200  # until it is measured: most machines are faster
LEAST: dict[RateName, int] = {  # smaller amounts tell of fixed costs and hiccups, not of a rate
    "disk_bytes_per_s": 8 << 20,
    "bus_bytes_per_s": 8 << 20,
    "prefill_tokens_per_s": 64,
}


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine has shown so far; None: not measured yet. `bus`: host memory to device."""

    disk_bytes_per_s: float | None = None
    bus_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None

    def observed(self, rate: RateName, amount: int, elapsed_s: float) -> Rates:
        """The rates after `amount` bytes or tokens took `elapsed_s`.

        The average is one of seconds per unit, for seconds are what is predicted. An amount below
        LEAST, or a time of nothing, says nothing.
        """
        if amount < LEAST[rate] or elapsed_s <= 0:
            return self
        known: float | None = getattr(self, rate)
        unit_s = elapsed_s / amount
        if known is not None:
            unit_s = _WEIGHT * unit_s + (1 - _WEIGHT) / known
        return replace(self, **{rate: 1 / unit_s})

    def after_refusal(self) -> Rates:
        """The rates after a restore was refused. Nothing was measured; a disk that was slow once
        must not be thought slow for ever.
        """

        def relieved(rate: float | None) -> float | None:
            return None if rate is None else rate * _RELIEF

        return replace(
            self,
            disk_bytes_per_s=relieved(self.disk_bytes_per_s),
            bus_bytes_per_s=relieved(self.bus_bytes_per_s),
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """`restore` or run the tokens again, and the two times that were compared; None: not known."""

    restore: bool
    reason: Reason
    restore_s: float | None
    prefill_s: float | None


def patience_s(num_tokens: int, rates: Rates) -> float:
    """How long to wait for what would save `num_tokens` tokens: after that long a disk hangs, or
    is so slow that it would have been better not to ask it.
    """
    prefill_s = num_tokens / (rates.prefill_tokens_per_s or _SLOW_PREFILL_TOKENS_PER_S)
    return max(_LEAST_PATIENCE_S, _PATIENCE * prefill_s)


def restore_or_prefill(
    num_tokens: int, *, memory_bytes: int, disk_bytes: int, rates: Rates
) -> Decision:
    """Decide about a prefix of `num_tokens` tokens, which is held in `memory_bytes` of memory and
    `disk_bytes` of files. Both cross the bus. A restore that cannot be timed yet is done: it is
    measured by that.
    """
    restore_s = _total_s(
        (disk_bytes, rates.disk_bytes_per_s),
        (memory_bytes + disk_bytes, rates.bus_bytes_per_s),
    )
    prefill_s = _total_s((num_tokens, rates.prefill_tokens_per_s))
    if restore_s is None or prefill_s is None:
        return Decision(True, "not_measured", restore_s, prefill_s)
    if restore_s <= prefill_s:
        return Decision(True, "restore_is_faster", restore_s, prefill_s)
    return Decision(False, "prefill_is_faster", restore_s, prefill_s)


def _total_s(*steps: tuple[int, float | None]) -> float | None:
    """The time of (amount, rate) one after the other, or None if one that matters is not known."""
    total_s = 0.0
    for amount, rate in steps:
        if amount == 0:
            continue
        if rate is None:
            return None
        total_s += amount / rate
    return total_s

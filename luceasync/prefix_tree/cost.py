"""Whether restoring a prefix is faster than running its tokens again, by measured rates. Pure.

Past reads predict the next one poorly: files may be in the page cache or not, which makes a factor
of ten. So a read is started, and judged by its progress once it has taken a small share of the time
that running the tokens takes. This needs neither a measurement at the start, which would be of
other bytes, nor a prefill beside each read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

RateName = Literal["disk_bytes_per_s", "bus_bytes_per_s", "prefill_tokens_per_s"]
Reason = Literal["restore_is_faster", "prefill_is_faster", "trial", "not_measured"]

_WEIGHT = 0.25  # weight of the newest observation
# Factor by which a refused restore is assumed faster next time, so that it is measured again.
_RELIEF = 1.1
_PATIENCE = 2.0  # times the time to run the tokens again
_LEAST_PATIENCE_S = 2.0  # a disk may have to wake up, or other processes keep the machine busy
_SLOW_PREFILL_TOKENS_PER_S = 200  # assumed until it is measured: most machines are faster
# Shares of the time to run the tokens, lost if a read is given up: a read that would take longer is
# given up at the first if it would by far, as its rate is not known well yet, else at the second.
_JUDGED_AT, _DECIDED_AT, _BY_FAR = 0.06, 0.09, 2.0
# For a read: when its rate is known well enough, and how long it may stay without any progress, as
# threads may be late.
_JUDGED_AT_S, _SILENT_S = 0.02, 0.05
_SILENT = 0.09  # share of the time to run the tokens
LEAST_JUDGED_BYTES = 16 << 20  # of files: smaller reads show only hiccups, and finish soon
# Of running the tokens: below this, a read is over, or late, before it can be judged.
_LEAST_TRIAL_S = 0.2
LEAST: dict[RateName, int] = {  # smaller amounts show fixed costs and hiccups, not a rate
    "disk_bytes_per_s": 8 << 20,
    "bus_bytes_per_s": 8 << 20,
    "prefill_tokens_per_s": 64,
}


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of this machine; None: not measured yet. `bus`: from host memory to the device;
    tokens of a prefill are those of `prefill_work`."""

    disk_bytes_per_s: float | None = None
    bus_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None

    def observed(self, rate: RateName, amount: float, elapsed_s: float) -> Rates:
        """The rates after `amount` bytes or tokens took `elapsed_s`.

        Seconds per unit are averaged, since seconds are predicted. An amount below LEAST, or no
        time at all, is ignored.
        """
        if amount < LEAST[rate] or elapsed_s <= 0:
            return self
        known: float | None = getattr(self, rate)
        unit_s = elapsed_s / amount
        if known is not None:
            unit_s = _WEIGHT * unit_s + (1 - _WEIGHT) / known
        return replace(self, **{rate: 1 / unit_s})

    def after_refusal(self) -> Rates:
        """The rates after a restore was refused. Nothing was measured, but a disk that was slow
        once must not count as slow for ever."""

        def relieved(rate: float | None) -> float | None:
            return None if rate is None else rate * _RELIEF

        return replace(
            self,
            disk_bytes_per_s=relieved(self.disk_bytes_per_s),
            bus_bytes_per_s=relieved(self.bus_bytes_per_s),
        )


@dataclass(frozen=True, slots=True)
class Arrival:
    """How many bytes of a read have arrived within `elapsed_s` of its start."""

    num_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to `restore` or to run the tokens again; and the two times compared, None if not
    known."""

    restore: bool
    reason: Reason
    restore_s: float | None
    prefill_s: float | None


def prefill_work(begin: int, end: int, attention_tokens: float | None) -> float:
    """The cost of running tokens `[begin, end)` of a prompt, as a number of tokens that see nothing
    before them. `attention_tokens`: how many tokens a token must see for attention to cost as much
    as everything else; None: there is no attention."""
    num_tokens = float(end - begin)
    if attention_tokens is None:
        return num_tokens
    return num_tokens + (end**2 - begin**2) / (2 * attention_tokens)


def is_given_up(
    num_tokens: float, *, num_bytes: int, first: Arrival | None, come: Arrival, rates: Rates
) -> bool:
    """Whether to give up a read of `num_bytes`, of which `come` has arrived, and to run the
    `num_tokens` tokens that it would save: as soon as its rate is known, and the rest of it takes
    longer than they do. `first`: an earlier arrival; a read may begin slowly."""
    prefill_s = _total_s((num_tokens, rates.prefill_tokens_per_s))
    if num_bytes < LEAST_JUDGED_BYTES or prefill_s is None or prefill_s < _LEAST_TRIAL_S:
        return False
    if come.num_bytes == 0:
        return come.elapsed_s >= max(_SILENT * prefill_s, _SILENT_S)
    if come.elapsed_s < max(_JUDGED_AT * prefill_s, _JUDGED_AT_S):
        return False
    is_early = come.elapsed_s < _DECIDED_AT * prefill_s
    bytes_per_s = come.num_bytes / come.elapsed_s
    if first is not None and first.elapsed_s < come.elapsed_s:
        since_s = come.elapsed_s - first.elapsed_s
        bytes_per_s = max(bytes_per_s, (come.num_bytes - first.num_bytes) / since_s)
    elif is_early:
        return False
    left_s = (num_bytes - come.num_bytes) / bytes_per_s
    left_s += num_bytes / (rates.bus_bytes_per_s or float("inf"))
    return left_s > prefill_s * (_BY_FAR if is_early else 1)


def patience_s(num_tokens: float, rates: Rates) -> float:
    """How long to wait for a read that would save `num_tokens` tokens: a disk that takes longer
    hangs, or is slower than running them."""
    prefill_s = num_tokens / (rates.prefill_tokens_per_s or _SLOW_PREFILL_TOKENS_PER_S)
    return max(_LEAST_PATIENCE_S, _PATIENCE * prefill_s)


def restore_or_prefill(
    num_tokens: float, *, memory_bytes: int, disk_bytes: int, rates: Rates
) -> Decision:
    """Decide about a prefix of `num_tokens` tokens, which is held in `memory_bytes` of memory and
    `disk_bytes` of files. Both cross the bus. A restore whose time is not known yet is done, and
    thereby measured. A read that would be too slow at the rate of earlier ones is still tried: see
    `is_given_up`."""
    bus = memory_bytes + disk_bytes, rates.bus_bytes_per_s
    if disk_bytes and rates.bus_bytes_per_s is None:
        bus = 0, None  # not measured yet: the disk takes most of the time
    restore_s = _total_s((disk_bytes, rates.disk_bytes_per_s), bus)
    prefill_s = _total_s((num_tokens, rates.prefill_tokens_per_s))
    if restore_s is None or prefill_s is None:
        return Decision(True, "not_measured", restore_s, prefill_s)
    if restore_s <= prefill_s:
        return Decision(True, "restore_is_faster", restore_s, prefill_s)
    bus_s = _total_s(bus)
    is_judged = disk_bytes >= LEAST_JUDGED_BYTES and prefill_s >= _LEAST_TRIAL_S
    if is_judged and bus_s is not None and bus_s < prefill_s:
        return Decision(True, "trial", restore_s, prefill_s)
    return Decision(False, "prefill_is_faster", restore_s, prefill_s)


def _total_s(*steps: tuple[float, float | None]) -> float | None:
    """The total time of the (amount, rate) steps; None if a rate that matters is not known."""
    total_s = 0.0
    for amount, rate in steps:
        if amount == 0:
            continue
        if rate is None:
            return None
        total_s += amount / rate
    return total_s

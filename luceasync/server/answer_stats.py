"""What an answer tells of the work behind it: its times, what was restored, what speculation did.

Owns how the finishes of several choices become one account. Knows no API: all say it in this way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from luceasync.request import Finish, Residence, Speculation

Finishes = Mapping[int, Finish]


class TimingsBody(msgspec.Struct):
    """Milliseconds and tokens per second; `predicted` counts the tokens after the first of each
    choice.
    """

    queued_ms: float
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class SpeculationBody(msgspec.Struct):
    """Draft tokens of all choices together; `tau` is tokens per verify step."""

    rounds: int
    proposed: int
    accepted: int
    tau: float
    accept_rate: float
    off_reason: str | UnsetType = UNSET


class ResidenceBody(msgspec.Struct):
    """Of all choices together: tokens of their contexts that were on the devices at their ends and
    that were not, in whole chunks; chunks that came back and that left, and looks that said which.
    """

    resident: int
    absent: int
    recalled: int
    evicted: int
    looks: int


class LuceasyncBody(msgspec.Struct):
    """What OpenAI has no field for: what was restored instead of computed, what speculation did,
    what of a context was on the devices.
    """

    restore: bool
    tier: Literal["memory", "disk"] | None
    disk_hit: bool
    prefix_tokens: int
    restore_ms: float
    decision: str | None
    miss_reason: str | None
    speculation: SpeculationBody | UnsetType = UNSET
    kvflash: ResidenceBody | UnsetType = UNSET


def timings_of(finishes: Finishes) -> TimingsBody:
    """Choices run side by side: their tokens add up, the longest time counts."""
    timings = [finish.timings for finish in finishes.values()]
    prefill_s = max(timing.prefill_s for timing in timings)
    decode_s = max(timing.decode_s for timing in timings)
    num_prefilled = sum(timing.num_prefilled for timing in timings)
    num_decoded = sum(timing.num_decoded for timing in timings)
    return TimingsBody(
        queued_ms=_ms(max(timing.queued_s for timing in timings)),
        prompt_n=num_prefilled,
        prompt_ms=_ms(prefill_s),
        prompt_per_second=_rate(num_prefilled, prefill_s),
        predicted_n=num_decoded,
        predicted_ms=_ms(decode_s),
        predicted_per_second=_rate(num_decoded, decode_s),
    )


def luceasync_of(finishes: Finishes) -> LuceasyncBody:
    """The prompt was restored once, for choice 0; what speculation did for each choice adds up."""
    restore = finishes[0].restore
    return LuceasyncBody(
        restore=restore.tier is not None,
        tier=restore.tier,
        disk_hit=restore.tier == "disk",
        prefix_tokens=restore.prefix_tokens,
        restore_ms=_ms(restore.restore_s),
        decision=restore.decision,
        miss_reason=restore.miss_reason,
        speculation=_speculation([finishes[index].speculation for index in sorted(finishes)]),
        kvflash=_residence([finish.residence for finish in finishes.values()]),
    )


def _residence(of_choices: Sequence[Residence | None]) -> ResidenceBody | UnsetType:
    present = [one for one in of_choices if one is not None]
    if not present:
        return UNSET
    return ResidenceBody(
        sum(one.resident_tokens for one in present),
        sum(one.absent_tokens for one in present),
        sum(one.recalled for one in present),
        sum(one.evicted for one in present),
        sum(one.looks for one in present),
    )


def _speculation(of_choices: Sequence[Speculation | None]) -> SpeculationBody | UnsetType:
    present = [one for one in of_choices if one is not None]
    if not present:
        return UNSET
    total = Speculation(
        sum(one.rounds for one in present),
        sum(one.proposed for one in present),
        sum(one.accepted for one in present),
    )
    return SpeculationBody(
        total.rounds,
        total.proposed,
        total.accepted,
        tau=round(total.tau, 4),
        accept_rate=round(total.accept_rate, 4),
        off_reason=next((one.off_reason for one in present if one.off_reason), UNSET),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(num_tokens: int, seconds: float) -> float:
    return round(num_tokens / seconds, 3) if seconds > 0 else 0.0

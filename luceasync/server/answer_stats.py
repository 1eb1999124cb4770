"""The statistics in an answer: timings, restored tokens, speculation.

Sums them over the choices of a request, in the form that all APIs report, and keeps the statistics
of recent answers for the status page.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from luceasync.request import Finish, Residence, Speculation

Finishes = Mapping[int, Finish]
MAX_RECENT = 24


class TimingsBody(msgspec.Struct):
    """Milliseconds and tokens per second; the first token of each choice is left out of
    `predicted_*`.
    """

    queued_ms: float
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class SpeculationBody(msgspec.Struct):
    """Draft tokens of all choices; `tau` is the mean number of tokens per verify step."""

    rounds: int
    proposed: int
    accepted: int
    tau: float
    accept_rate: float
    off_reason: str | UnsetType = UNSET


class ResidenceBody(msgspec.Struct):
    """Sums over all choices, in whole chunks: context tokens resident on the devices and absent
    from them at the end, and chunks recalled and evicted. Also how often the resident chunks were
    reselected.
    """

    resident: int
    absent: int
    recalled: int
    evicted: int
    looks: int


class LuceasyncBody(msgspec.Struct):
    """Statistics that OpenAI's API has no field for: restored tokens, speculation, and which part
    of the context is resident.
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
    """Token counts are summed; choices run in parallel, so times are those of the slowest."""
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
    """Restored tokens are those of choice 0, which restores the prompt; the rest is summed."""
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


class AnswerRecord(msgspec.Struct, frozen=True):
    """The first choice of a finished request. `conversation` is the label of its conversation."""

    conversation: str | None
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: TimingsBody
    luceasync: LuceasyncBody
    ended_s: float


class RecentAnswers:
    """Statistics of the last MAX_RECENT answers, without their text."""

    def __init__(self) -> None:
        self._ends: deque[tuple[str | None, Finish, float]] = deque(maxlen=MAX_RECENT)

    def add(self, conversation: str | None, finish: Finish) -> None:
        """Record the statistics of a finished answer."""
        self._ends.append((conversation, finish, time.monotonic()))

    def records(self) -> list[AnswerRecord]:
        """The records, newest first; `ended_s` is the number of seconds since the answer ended."""
        now_s = time.monotonic()
        return [
            _record(conversation, finish, now_s - ended_s)
            for conversation, finish, ended_s in reversed(self._ends)
        ]


def _record(conversation: str | None, finish: Finish, ended_s: float) -> AnswerRecord:
    usage, one = finish.usage, {0: finish}
    return AnswerRecord(
        conversation,
        finish.reason,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        timings_of(one),
        luceasync_of(one),
        ended_s,
    )

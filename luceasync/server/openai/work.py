"""What an answer tells of the work behind it: its tokens, its times, what was restored.

Owns how the finishes of several choices become one account. Knows nothing of chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET, UnsetType

from luceasync.request import Finish, Speculation
from luceasync.server.openai.chat_shapes import (
    LuceasyncBody,
    PromptTokensDetails,
    SpeculationBody,
    TimingsBody,
    UsageBody,
)

Finishes = Mapping[int, Finish]


def usage_of(finishes: Finishes) -> UsageBody:
    """The prompt counts once, as choice 0 found it; the tokens of all choices add up."""
    prompt, cached = finishes[0].usage.prompt_tokens, finishes[0].usage.cached_tokens
    completion = sum(finish.usage.completion_tokens for finish in finishes.values())
    return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached))


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

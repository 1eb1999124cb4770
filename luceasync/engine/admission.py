"""What the engine does next. Pure: looks at counts and times, touches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Step = Literal["prefill", "decode", "idle"]


@dataclass(frozen=True, slots=True)
class Load:
    """The work at hand, and how long each kind has run since the other one waited last."""

    num_prefilling: int
    num_decoding: int
    prefill_s: float
    decode_s: float


def next_step(load: Load) -> Step:
    """Prefill and decode get equal time while both have work; neither waits for the other to
    finish.

    A chunk of a long prompt may take as long as many decode steps: equal turns would starve the
    streams.
    """
    if load.num_prefilling == 0:
        return "decode" if load.num_decoding else "idle"
    if load.num_decoding == 0:
        return "prefill"
    return "prefill" if load.decode_s >= load.prefill_s else "decode"


def retry_after_s(num_lanes: int, mean_request_s: float) -> int:
    """Seconds until a lane, and with it a place in the queue, is likely to be free: 1 to 60."""
    return max(1, min(60, round(mean_request_s / num_lanes)))

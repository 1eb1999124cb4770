"""What the engine does next, a prefill or a decode. Looks at counts and times, touches nothing."""

from __future__ import annotations

from collections.abc import Sequence
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


def next_prefill(have_spoken: Sequence[bool]) -> int:
    """The index of the prompt that gets a chunk, of those in the order in which they got lanes:
    first who has spoken and lost its lane meanwhile, for somebody reads it; else who came first.
    """
    return have_spoken.index(True) if True in have_spoken else 0


class Balance:
    """How long prefill and decode have run while both were wanted."""

    def __init__(self) -> None:
        self._prefill_s = 0.0  # since decode had its share last
        self._decode_s = 0.0

    def next_step(self, num_prefilling: int, num_decoding: int) -> Step:
        """See `next_step`."""
        return next_step(Load(num_prefilling, num_decoding, self._prefill_s, self._decode_s))

    def account(self, step: Step, seconds: float, *, both: bool) -> None:
        """A step has taken so long; `both`: the other kind had work too."""
        if not both:
            self._prefill_s = self._decode_s = 0.0
        elif step == "prefill":
            self._prefill_s, self._decode_s = seconds, 0.0
        else:
            self._decode_s += seconds

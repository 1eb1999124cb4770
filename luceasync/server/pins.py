"""The field `kvflash_pin`, of which every API that asks for an answer has one: tokens of a prompt
that are to stay on the devices.

Owns the field's form and the words of its refusal. What fits is the engine's to say.
"""

from __future__ import annotations

from typing import Literal

from luceasync.server.checks import at_most, refuse

PARAM = "kvflash_pin"
MAX_PINS = 64
PINS = "'system', or spans [begin, end] of the prompt's tokens, the end not included"

AskedPins = str | list[tuple[int, int]]  # the field as it comes
Pins = tuple[tuple[int, int], ...] | Literal["system"]


def pins_of(asked: AskedPins | None) -> Pins:
    """Spans of the prompt's tokens, or the system message. Raises RequestError."""
    if asked is None:
        return ()
    if isinstance(asked, str):
        return "system" if asked == "system" else refuse(PARAM, asked, PINS)
    at_most(PARAM, asked, MAX_PINS, "spans")
    for i, span in enumerate(asked):
        if not 0 <= span[0] < span[1]:
            refuse(f"{PARAM}[{i}]", list(span), PINS)
    return tuple(asked)

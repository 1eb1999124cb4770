"""How long an answer may think, in the words of clients: an effort, or a number of tokens.

Owns what an effort is in tokens. Knows no API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from starlette.datastructures import Headers

from luceasync.errors import RequestError
from luceasync.server.checks import at_most, in_range, refuse

# Tokens of reasoning; None: as long as it takes.
EFFORTS: dict[str, int | None] = {
    "none": 0,
    "minimal": 512,
    "low": 2048,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
}


def most_tokens(param: str, effort: str | None) -> int | None:
    """How many tokens of reasoning `effort` allows; None: any number. Raises RequestError for a
    word that is none.
    """
    if effort is None:
        return None
    if effort not in EFFORTS:
        refuse(param, effort, f"one of {', '.join(EFFORTS)}")
    return EFFORTS[effort]


def budget(param: str, tokens: int | None, otherwise: int | None) -> int | None:
    """A number of tokens that was named, or `otherwise`."""
    return otherwise if tokens is None else in_range(param, tokens, 0, 2**31 - 1)


def template_words(effort: str | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a chat template is told of the effort, beside what the client tells it itself."""
    told: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        told["enable_thinking"] = False
    return {**told, **(given or {})}


# Which conversation a request belongs to, as clients tell it. Owns the headers, and how long a
# name may be. A hint that makes no sense in a header is no fault of the request: nobody asked
# for it. Knows no body but for the one field.


# Of Codex, OpenCode and others, Claude Code; a session is less than what shares a key.
SESSION_HEADERS = ("session-id", "x-session-id", "x-claude-code-session-id")
MAX_HEADER_CHARS = 256
MAX_KEY_CHARS = 64  # as OpenAI has it


def conversation_of(headers: Headers, key: str | None = None) -> str:
    """The client's name for it; "" where it has none. `key`: the body's `prompt_cache_key`. Raises
    RequestError for one that is too long, as OpenAI does.
    """
    if key is not None and len(key) > MAX_KEY_CHARS:
        raise RequestError(
            f"Invalid 'prompt_cache_key': string too long. Expected a string with maximum length "
            f"{MAX_KEY_CHARS}, but got a string with length {len(key)} instead.",
            param="prompt_cache_key",
            code="string_above_max_length",
        )
    told = (headers.get(name, "").strip() for name in SESSION_HEADERS)
    return next((word for word in told if 0 < len(word) <= MAX_HEADER_CHARS), key or "")


# The field `kvflash_pin`, of which every API that asks for an answer has one: tokens of a
# prompt that are to stay on the devices. Owns the field's form and the words of its refusal.
# What fits is the engine's to say.


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

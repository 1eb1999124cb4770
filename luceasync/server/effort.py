"""How long an answer may think, in the words of clients: an effort, or a number of tokens.

Owns what an effort is in tokens. Knows no API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from luceasync.server.checks import in_range, refuse

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

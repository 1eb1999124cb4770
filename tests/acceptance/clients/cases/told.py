"""Cases of one client, each reported as a line of JSON. Runs in the client's environment and
imports nothing else of ours.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable

URL = os.environ["LUCE_URL"]
MODEL = "luce"
WORDS = "A few words about it"
LONG = "What does json.dumps do, and what does it not do? " * 12
LOOK = 'Look it up. [[look_up {"name": "json.dumps", "depth": 3}]] [[say It writes JSON]]'
AGAIN = 'Once more. [[look_up {"name": "json.loads", "depth": 1}]] [[say It reads JSON]]'
FOUND = "json.dumps writes an object as text"
SLACK = 16  # tokens that open an answer, which a next turn may write otherwise
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "depth": {"type": "integer"}},
    "required": ["name"],
}


def tell(*cases: Callable[[], None]) -> None:
    """Run each case; an exception becomes its line's error."""
    for case in cases:
        error = None
        try:
            case()
        except Exception:
            error = traceback.format_exc()[-600:]
        print(json.dumps({"case": case.__name__, "error": error}), flush=True)


def covers(cached: int | None, first: int | None) -> None:
    """Whether the first turn's prompt was cached."""
    assert cached is not None and first is not None and cached >= first - SLACK, (cached, first)


def usage_of(answer) -> tuple[int, int]:
    """Prompt tokens and cached ones, as any of the three APIs reports them."""
    told = answer.usage
    if hasattr(told, "cache_read_input_tokens"):
        return told.input_tokens + told.cache_read_input_tokens, told.cache_read_input_tokens
    if hasattr(told, "input_tokens_details"):
        return told.input_tokens, told.input_tokens_details.cached_tokens
    return told.prompt_tokens, told.prompt_tokens_details.cached_tokens

"""Which tokens of a prompt are to stay on the devices, as a request asks for it. Pure.

Owns the words of a refusal. Knows chunks, and how many of them may stay; no lane and no page.
"""

from __future__ import annotations

from typing import NoReturn

from luceasync.engine.pin_room import PinRoom, Spans
from luceasync.engine.prompts import Rendered
from luceasync.errors import RequestError
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.request import ChatPrompt, Request

PARAM = "kvflash_pin"


def pins_of(request: Request, prompt: Rendered, room: PinRoom | None) -> Spans:
    """The spans of the prompt that stay; `room` None: everything does. Raises RequestError."""
    if not request.pins:
        return ()
    spans = ((0, _system_end(request, prompt)),) if request.pins == "system" else request.pins
    num_tokens = len(prompt.ids)
    for begin, end in spans:
        if end > num_tokens:
            _refuse(f"[{begin}, {end}] goes beyond the prompt, which has {num_tokens} tokens")
    if room is None:
        return ()
    num_asked, num_own = _num_chunks((*spans, *room.own)), _num_chunks(room.own)
    if num_asked > room.num_chunks:
        fits = (room.num_chunks - num_own) * CHUNK_TOKENS
        what = (num_asked - num_own) * CHUNK_TOKENS
        _refuse(f"{what} tokens, in chunks of {CHUNK_TOKENS}; {fits} fit, the first chunk besides")
    return spans


def _system_end(request: Request, prompt: Rendered) -> int:
    """Where the system message ends, with the tools that templates put into it."""
    asked = request.prompt
    first = asked.messages[0]["role"] if isinstance(asked, ChatPrompt) and asked.messages else None
    if first != "system" or not prompt.boundaries:
        _refuse('"system", but the prompt does not begin with a system message')
    return prompt.boundaries[0]


def _num_chunks(spans: Spans) -> int:
    """Chunks that the spans touch, without the first one of all."""
    touched = {
        c for begin, end in spans for c in range(begin // CHUNK_TOKENS, -(-end // CHUNK_TOKENS))
    }
    return len(touched - {0})


def _refuse(words: str) -> NoReturn:
    raise RequestError(f"Invalid value for '{PARAM}': {words}.", param=PARAM)

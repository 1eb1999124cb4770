"""A JSON body becomes a struct, and what is wrong in it is told by its name.

Owns the words of a refusal, and how much of a wrong value they repeat. Knows no field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sized
from reprlib import Repr
from typing import Any, Literal, NoReturn, TypeVar

import msgspec
from starlette.datastructures import Headers

from luceasync.errors import RequestError

# How many values JSON text holds, told before any of them is made. Owns the counting. Knows no
# field, and not whether the text is JSON at all.


MAX_VALUES = 2**17  # of a body: with more, decoding alone holds up everybody
PIECE_BYTES = 64 << 10  # looked at in one go: less than a millisecond, then others may run


def has_too_many_values(body: bytes, most: int = MAX_VALUES) -> bool:
    """Whether `body` holds more than `most` values.

    Text is looked at for what separates values, and first as it stands: that is enough for nearly
    all bodies, for what stands within strings can only make it seem more. The work is that of a few
    searches, however many values there are.
    """
    return _exceeds(map(_num_separators, _pieces(body)), most) and _exceeds(
        map(_num_separators, _outside_strings(body)), most
    )


def _exceeds(counts: Iterator[int], most: int) -> bool:
    total = 0
    for count in counts:
        total += count
        if total > most:
            return True
    return False


def _pieces(body: bytes) -> Iterator[bytes]:
    """`body` in pieces that end with no escape half done."""
    begin = 0
    while begin < len(body):
        piece = body[begin : begin + PIECE_BYTES]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_backslashes % 2 and len(piece) == PIECE_BYTES:
            piece = piece[:-1]
        yield piece
        begin += len(piece)


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """What of each piece stands in no string; a body that is no JSON may be seen otherwise."""
    is_inside = False
    for piece in _pieces(body):
        bare = piece.replace(rb"\\", b"").replace(rb"\"", b"")  # no quote is left within a string
        parts = bare.split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _num_separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


MAX_ECHO_CHARS = 200  # of a wrong value: what came is recognised by its beginning
_beginning = Repr()  # builds no more of a value's text than it gives
_beginning.maxstring = _beginning.maxother = MAX_ECHO_CHARS

Body = TypeVar("Body")
Number = TypeVar("Number", int, float)


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """What `body` says. Raises RequestError with the field's path as `param`."""
    if has_too_many_values(body):
        raise RequestError(f"The request body holds too many values; at most {MAX_VALUES} may be.")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        param = re.sub(r"^\$\.?", "", path.strip("`").rsplit("`", 1)[-1]) or None
        where = f"'{param}'" if param else "the request body"
        raise RequestError(f"Invalid value for {where}: {cut(what)}.", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The request body is not valid JSON: {error}.") from None


def refuse(param: str, value: object, allowed: str) -> NoReturn:
    """Raise the RequestError for a field that holds `value`, where `allowed` was expected."""
    shown, param = cut(_beginning.repr(value)), cut(param)
    raise RequestError(f"Invalid value for '{param}': {shown}; expected {allowed}.", param=param)


def cut(text: str) -> str:
    """`text`, or its beginning."""
    return text if len(text) <= MAX_ECHO_CHARS else f"{text[:MAX_ECHO_CHARS]}..."


def at_most(param: str, values: Sized, most: int, what: str) -> None:
    """Raise RequestError where there are more than `most` of `what` under `param`."""
    if len(values) > most:
        raise RequestError(
            f"Invalid value for '{param}': {len(values)} {what}; expected at most {most}.",
            param=param,
        )


def check_arguments(param: str, schema: Mapping[str, Any]) -> None:
    """Raise RequestError where `schema`, that of a tool's arguments, says that they are no object:
    they always are.
    """
    kinds = schema.get("type")
    if kinds not in (None, "object") and not (isinstance(kinds, list) and "object" in kinds):
        refuse(f"{param}.type", kinds, "'object'")


def in_range(param: str, value: Number, least: Number, most: Number) -> Number:
    """`value`, unless it is outside `[least, most]`. Raises RequestError then."""
    if not least <= value <= most:
        refuse(param, value, f"a number from {least} to {most}")
    return value


def in_range_or(
    default: Number, param: str, value: Number | None, least: Number, most: Number
) -> Number:
    """`in_range`, and `default` for a field that is absent."""
    return default if value is None else in_range(param, value, least, most)


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

"""Decodes a JSON body into a struct and checks its fields; holds the fields that all APIs share.

Every error names the invalid field and quotes only the beginning of a wrong value.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping, Sized
from reprlib import Repr
from typing import Any, Literal, NoReturn, TypeVar

import msgspec
from starlette.datastructures import Headers

from luceasync.errors import RequestError

MAX_VALUES = 2**17  # in one body: decoding more would block all other requests
SCAN_BYTES = 64 << 10  # scanned at a time, in under a millisecond; other threads may run in between
MAX_ECHO_CHARS = 200  # of a wrong value in an error message
MAX_INT = 2**31 - 1
GZIP = b"\x1f\x8b"

FUNCTION_FIELDS = ("name", "description", "parameters")

_short_repr = Repr()  # never builds a longer text than it returns
_short_repr.maxstring = _short_repr.maxother = MAX_ECHO_CHARS

Body = TypeVar("Body")
Number = TypeVar("Number", int, float)


# Decoding


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Decode and validate `body`. Raises RequestError with the field's path as `param`."""
    if body.startswith(GZIP):
        _refuse_compressed("gzip")
    _require_utf8(body)
    if has_too_many_values(body):
        raise RequestError(
            f"The request body holds too many values; at most {MAX_VALUES} are allowed."
        )
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        param = re.sub(r"^\$\.?", "", path.strip("`").rsplit("`", 1)[-1]) or None
        where = f"'{param}'" if param else "the request body"
        raise RequestError(f"Invalid value for {where}: {shorten(what)}.", param=param) from None
    except (msgspec.DecodeError, RecursionError) as error:
        whole = with_whole_characters(body)
        if whole != body:
            return decode(decoder, whole)
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"The request body is not valid JSON: {why}.") from None


def _require_utf8(body: bytes) -> None:
    """Raise RequestError unless `body` is UTF-8: the decoder does not validate values that it skips
    or keeps undecoded.
    """
    try:
        for _text in codecs.iterdecode(_pieces(body), "utf-8"):
            pass
    except UnicodeDecodeError as error:
        raise RequestError(f"The request body is not valid UTF-8: {error.reason}.") from None


# An escape in JSON text: a surrogate pair, a lone surrogate (group 1), or any other.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


def with_whole_characters(text: bytes) -> bytes:
    """JSON text with U+FFFD for each unpaired surrogate: JavaScript may cut strings within a pair,
    and models write such escapes.
    """
    if b"\\u" not in text:
        return text
    return _ESCAPE.sub(lambda found: b"\\ufffd" if found[1] else found[0], text)


def has_too_many_values(body: bytes, most: int = MAX_VALUES) -> bool:
    """Whether JSON text holds more than `most` values, counted before any of them is built.

    Counts the separators `,`, `[` and `{`: first all of them, an upper bound that suffices for
    nearly all bodies, then only those outside strings. Takes a few searches, whatever the number of
    values.
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
    """`body` in pieces of SCAN_BYTES that never end between a backslash and the character it
    escapes.
    """
    begin = 0
    while begin < len(body):
        piece = body[begin : begin + SCAN_BYTES]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_backslashes % 2 and len(piece) == SCAN_BYTES:
            piece = piece[:-1]
        yield piece
        begin += len(piece)


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """The parts of each piece outside string literals; for invalid JSON, any result will do."""
    is_inside = False
    for piece in _pieces(body):
        bare = piece.replace(rb"\\", b"").replace(rb"\"", b"")  # all quotes left are delimiters
        parts = bare.split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _num_separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def refuse_compressed(headers: Headers) -> None:
    """Raise RequestError (415) for a body whose `headers` declare a compression."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        _refuse_compressed(shorten(encoding))


def _refuse_compressed(encoding: str) -> NoReturn:
    raise RequestError(
        f"The request body is compressed ({encoding}), which is not served here: send plain JSON.",
        code="unsupported_content_encoding",
        status=415,
    )


# Checks


def refuse(param: str, value: object, allowed: str) -> NoReturn:
    """Raise RequestError for a field whose `value` is not `allowed`."""
    shown, param = shorten(_short_repr.repr(value)), shorten(param)
    raise RequestError(f"Invalid value for '{param}': {shown}; expected {allowed}.", param=param)


def shorten(text: str) -> str:
    """`text`, truncated to MAX_ECHO_CHARS."""
    return text if len(text) <= MAX_ECHO_CHARS else f"{text[:MAX_ECHO_CHARS]}..."


def at_most(param: str, values: Sized, most: int, what: str) -> None:
    """Raise RequestError if `param` holds more than `most` of `what`."""
    if len(values) > most:
        raise RequestError(
            f"Invalid value for '{param}': {len(values)} {what}; expected at most {most}.",
            param=param,
        )


def in_range(param: str, value: Number, least: Number, most: Number) -> Number:
    """Return `value`. Raises RequestError outside `[least, most]`."""
    if not least <= value <= most:
        refuse(param, value, f"a number from {least} to {most}")
    return value


def in_range_or(
    default: Number, param: str, value: Number | None, least: Number, most: Number
) -> Number:
    """Like `in_range`, with a `default` for an absent field."""
    return default if value is None else in_range(param, value, least, most)


def check_arguments_schema(param: str, schema: Mapping[str, Any]) -> None:
    """Raise RequestError if the schema of a tool's arguments does not allow an object."""
    kinds = schema.get("type")
    if kinds not in (None, "object") and not (isinstance(kinds, list) and "object" in kinds):
        refuse(f"{param}.type", kinds, "'object'")


def tool_function(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool's function with the fields that chat templates read without checking, a description
    and a schema with properties; both are optional in requests.
    """
    description, parameters = function.get("description"), function.get("parameters") or {}
    if "properties" not in parameters and "$ref" not in parameters:
        parameters = {"type": "object", "properties": {}, **parameters}
    if description is not None and parameters is function.get("parameters"):
        return function
    described = {"name": function["name"], "description": description or ""}
    return {**described, "parameters": parameters} | {
        name: value for name, value in function.items() if name not in FUNCTION_FIELDS
    }


# Fields of all APIs that generate


PINS_PARAM = "kvflash_pin"
MAX_PINS = 64
LEAST_TOP_P = 1e-9
PINS_ALLOWED = "'system', or spans [begin, end] of prompt tokens, `end` not included"

PinsField = str | list[tuple[int, int]]
Pins = tuple[tuple[int, int], ...] | Literal["system"]


class GenerationBody(msgspec.Struct, kw_only=True):
    """The fields that all APIs have; null is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    kvflash_pin: PinsField | None = None


def temperature_of(body: GenerationBody, most: float = 2.0) -> float:
    """The temperature, 1 by default. Raises RequestError above `most`."""
    return in_range_or(1.0, "temperature", body.temperature, 0.0, most)


def top_p_of(body: GenerationBody) -> float:
    """`top_p`, in (0, 1], 1 by default; 0 leaves only the likeliest token. Raises RequestError."""
    return max(LEAST_TOP_P, in_range_or(1.0, "top_p", body.top_p, 0.0, 1.0))


def pins_of(body: GenerationBody) -> Pins:
    """Spans of prompt tokens, or the system message, to keep on the devices.

    Raises RequestError. Whether they fit is checked by the engine.
    """
    pins = body.kvflash_pin
    if pins is None:
        return ()
    if isinstance(pins, str):
        return "system" if pins == "system" else refuse(PINS_PARAM, pins, PINS_ALLOWED)
    at_most(PINS_PARAM, pins, MAX_PINS, "spans")
    for i, span in enumerate(pins):
        if not 0 <= span[0] < span[1]:
            refuse(f"{PINS_PARAM}[{i}]", list(span), PINS_ALLOWED)
    return tuple(pins)


# Reasoning


# Reasoning tokens that an effort allows; None: unlimited.
EFFORTS: dict[str, int | None] = {
    "none": 0,
    "minimal": 512,
    "low": 2048,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
}


def effort_tokens(param: str, effort: str | None) -> int | None:
    """How many reasoning tokens `effort` allows; None: unlimited. Raises RequestError for an
    unknown effort.
    """
    if effort is None:
        return None
    if effort not in EFFORTS:
        refuse(param, effort, f"one of {', '.join(EFFORTS)}")
    return EFFORTS[effort]


def budget_or(default: int | None, param: str, tokens: int | None) -> int | None:
    """An explicit budget of reasoning tokens, or `default`. Raises RequestError."""
    return default if tokens is None else in_range(param, tokens, 0, MAX_INT)


def template_kwargs_of(effort: str | None, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The chat template's variables: those that follow from `effort`, overridden by the client's
    `kwargs`.
    """
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        variables["enable_thinking"] = False
    return {**variables, **(kwargs or {})}


# Conversations


# Sent by Codex, by OpenCode and others, and by Claude Code. A session is narrower than the requests
# that share a `prompt_cache_key`, so a header takes precedence over the body's field.
SESSION_HEADERS = ("session-id", "x-session-id", "x-claude-code-session-id")
MAX_SESSION_CHARS = 256
MAX_CACHE_KEY_CHARS = 64  # as in OpenAI's API


def conversation_id_of(headers: Headers, prompt_cache_key: str | None = None) -> str:
    """The client's name for the conversation; "" if it sends none.

    Unusable headers are ignored, since clients send them by default. Raises RequestError for a
    `prompt_cache_key` that is too long, as OpenAI does.
    """
    if prompt_cache_key is not None and len(prompt_cache_key) > MAX_CACHE_KEY_CHARS:
        raise RequestError(
            "Invalid 'prompt_cache_key': string too long. Expected a string with maximum length "
            f"{MAX_CACHE_KEY_CHARS}, but got a string with length {len(prompt_cache_key)} instead.",
            param="prompt_cache_key",
            code="string_above_max_length",
        )
    sessions = (headers.get(name, "").strip() for name in SESSION_HEADERS)
    usable = (session for session in sessions if 0 < len(session) <= MAX_SESSION_CHARS)
    return next(usable, prompt_cache_key or "")

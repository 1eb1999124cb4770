"""Tool calls as JSON: {"name": "f", "arguments": {...}}, as Qwen3 and Llama 3 write them.

Owns the order in which members may come. Arguments are passed on as the model wrote them, to the
space, so that a later prompt can repeat the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from luceasync.text.answer.growing_text import (
    ArgumentsText,
    CallName,
    FormatMismatch,
    GrowingText,
    Reading,
)

_SPECIAL = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_LITERAL = re.compile(r"[^\s,:{}\[\]\"]*")
MAX_LITERAL_CHARS = 512  # no number is longer
ARGUMENTS = ("arguments", "parameters")


def value(text: GrowingText) -> Reading[tuple[Any, str]]:
    """The JSON value here (RFC 8259), and its text: as written, unless strings in it contain line
    ends that JSON wants escaped. Raises FormatMismatch for anything else.
    """
    yield from text.skip()
    begin = text.place
    match text.text[begin]:
        case '"':
            text.place = yield from _string_end(text, begin)
        case "{" | "[":
            text.place = yield from _nested_end(text, begin)
        case _:
            text.place = yield from _literal_end(text, begin)
    return _parsed(text.text[begin : text.place])


def key(text: GrowingText) -> Reading[str]:
    """The name of a member; consumes its colon too."""
    yield from text.skip()
    if not text.text.startswith('"', text.place):
        raise FormatMismatch
    name, _ = yield from value(text)
    yield from text.skip()
    yield from text.take(":")
    assert isinstance(name, str), "it begins with a quote"
    return name


def _string_end(text: GrowingText, begin: int) -> Reading[int]:
    place = begin + 1
    while True:
        found = _IN_STRING.search(text.text, place)
        if found is None:
            place = len(text.text)
        elif found[0] == '"':
            return found.end()
        elif found.end() < len(text.text):
            place = found.end() + 1  # skip the escaped character
            continue
        else:
            place = found.start()
        yield from text.more()


def _nested_end(text: GrowingText, begin: int) -> Reading[int]:
    """The end of the object or list that begins here. Whether its brackets match is checked when
    it is parsed.
    """
    depth, place = 0, begin
    while True:
        found = _SPECIAL.search(text.text, place)
        if found is None:
            place = len(text.text)
            yield from text.more()
            continue
        if found[0] == '"':
            place = yield from _string_end(text, found.start())
            continue
        depth += 1 if found[0] in "{[" else -1
        place = found.end()
        if depth == 0:
            return place


def _literal_end(text: GrowingText, begin: int) -> Reading[int]:
    while True:
        found = _LITERAL.match(text.text, begin)
        assert found is not None, "it matches the empty text"
        if found.end() - begin > MAX_LITERAL_CHARS:
            raise FormatMismatch
        if found.end() < len(text.text):
            return found.end()
        yield from text.more()


def _parsed(written: str) -> tuple[Any, str]:
    try:
        try:
            return json.loads(written, parse_constant=_refuse), written
        except json.JSONDecodeError:
            found = json.loads(written, parse_constant=_refuse, strict=False)
            return found, json.dumps(found, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise FormatMismatch from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and the like are not JSON


def read_object(text: GrowingText, known: Sequence[str] | None = None) -> Reading[None]:
    """The object of a call; what follows its arguments is parsed leniently. Raises FormatMismatch,
    also for the name of a tool that is not in `known`, if given.
    """
    yield from text.take("{")
    name: str | None = None
    arguments = "{}"
    while True:
        member = yield from key(text)
        if member == "name":
            name = _name((yield from value(text))[0], known)
        elif member not in ARGUMENTS:
            yield from value(text)
        elif name is None:  # arguments come after the name
            found, written = yield from value(text)
            arguments = _object(found, written)
        else:
            yield from _called(text, name)
            yield from _rest(text)
            return
        yield from text.skip()
        if (yield from text.take(",", "}")) == "}":
            break
    if name is None:
        raise FormatMismatch
    yield CallName(name)
    yield ArgumentsText(arguments)


def _called(text: GrowingText, name: str) -> Reading[None]:
    """Yield the call once its arguments begin, then the arguments one by one; an object in a
    string, as some models write it, is yielded at once.
    """
    yield from text.skip()
    if not text.text.startswith("{", text.place):
        found, written = yield from value(text)
        arguments = _object(found, written)
        yield CallName(name)
        yield ArgumentsText(arguments)
        return
    yield CallName(name)
    begin = text.place  # of what is not yielded yet
    text.place += 1
    yield from text.skip()
    while not text.text.startswith("}", text.place):
        yield from key(text)
        yield from text.skip()
        before = text.text[begin : text.place]
        _, written = yield from value(text)
        yield ArgumentsText(before + written)
        begin = text.place
        yield from text.skip()
        if (yield from text.take(",", "}")) == "}":
            text.place -= 1
    text.place += 1
    yield ArgumentsText(text.text[begin : text.place])


def _rest(text: GrowingText) -> Reading[None]:
    """Skip what follows the arguments: other members, and the end, which a model may forget."""
    while True:
        yield from text.skip()
        if not text.text.startswith(",", text.place):
            break
        text.place += 1
        yield from key(text)
        yield from value(text)
    if text.text.startswith("}", text.place):
        text.place += 1


def _name(found: Any, known: Sequence[str] | None) -> str:
    if not isinstance(found, str) or not found or (known is not None and found not in known):
        raise FormatMismatch
    return found


def _object(found: Any, written: str) -> str:
    """The JSON text of an object, which may be inside a string."""
    if isinstance(found, dict):
        return written
    if not isinstance(found, str):
        raise FormatMismatch
    try:
        inner = json.loads(found)
    except (ValueError, RecursionError) as error:
        raise FormatMismatch from error
    if not isinstance(inner, dict):
        raise FormatMismatch
    return found

"""JSON read from a text that grows: one value after the other, each as it was written.

Source: RFC 8259. Owns where a value ends. Knows no calls.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from luceasync.text.answer.growing import Broken, Growing, Reading

_SPECIAL = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_LITERAL = re.compile(r"[^\s,:{}\[\]\"]*")
MAX_LITERAL_CHARS = 512  # no number is longer


def value(text: Growing) -> Reading[tuple[Any, str]]:
    """The value that stands here, and how it is written: as in the text, unless strings in it have
    line ends that JSON wants escaped. Raises Broken for what is no JSON.
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


def key(text: Growing) -> Reading[str]:
    """The name of a member, up to and with its colon."""
    yield from text.skip()
    if not text.text.startswith('"', text.place):
        raise Broken
    name, _ = yield from value(text)
    yield from text.skip()
    yield from text.take(":")
    assert isinstance(name, str), "it begins with a quote"
    return name


def _string_end(text: Growing, begin: int) -> Reading[int]:
    place = begin + 1
    while True:
        found = _IN_STRING.search(text.text, place)
        if found is None:
            place = len(text.text)
        elif found[0] == '"':
            return found.end()
        elif found.end() < len(text.text):
            place = found.end() + 1  # whatever is escaped
            continue
        else:
            place = found.start()
        yield from text.more()


def _nested_end(text: Growing, begin: int) -> Reading[int]:
    """Where the object or list ends that begins here; that its brackets match is seen later."""
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


def _literal_end(text: Growing, begin: int) -> Reading[int]:
    while True:
        found = _LITERAL.match(text.text, begin)
        assert found is not None, "it matches the empty text"
        if found.end() - begin > MAX_LITERAL_CHARS:
            raise Broken
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
        raise Broken from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and the like are no JSON

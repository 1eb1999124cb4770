"""Calls as JSON: {"name": "f", "arguments": {...}}, as Qwen3 and Llama 3 write them.

Owns the order in which members may come. What the model wrote of the arguments is told as it is,
to the space, so that the same text can be given back to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from luceasync.text.answer.growing import Argued, Begun, Broken, Growing, Reading

# JSON read from a text that grows: one value after the other, each as it was written. Source:
# RFC 8259. Owns where a value ends. Knows no calls.


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


ARGUMENTS = ("arguments", "parameters")


def read_object(text: Growing, known: Sequence[str] | None = None) -> Reading[None]:
    """A call's object, up to the end of its arguments; what follows of it is taken leniently.
    Raises Broken, also for the name of a tool that is not `known` where that is given.
    """
    yield from text.take("{")
    name: str | None = None
    held: str | None = None
    while True:
        member = yield from key(text)
        if member == "name":
            name = _name((yield from value(text))[0], known)
        elif member not in ARGUMENTS:
            yield from value(text)
        elif name is None:  # they are told after the name
            found, written = yield from value(text)
            held = _object(found, written)
        else:
            yield from _called(text, name)
            yield from _rest(text)
            return
        yield from text.skip()
        if (yield from text.take(",", "}")) == "}":
            break
    if name is None:
        raise Broken
    yield Begun(name)
    yield Argued("{}" if held is None else held)


def _called(text: Growing, name: str) -> Reading[None]:
    """The call, once there are arguments: told one by one; an object in a string, as some models
    write it, at once.
    """
    yield from text.skip()
    if not text.text.startswith("{", text.place):
        found, written = yield from value(text)
        arguments = _object(found, written)
        yield Begun(name)
        yield Argued(arguments)
        return
    yield Begun(name)
    told = text.place
    text.place += 1
    yield from text.skip()
    while not text.text.startswith("}", text.place):
        yield from key(text)
        yield from text.skip()
        before = text.text[told : text.place]
        _, written = yield from value(text)
        yield Argued(before + written)
        told = text.place
        yield from text.skip()
        if (yield from text.take(",", "}")) == "}":
            text.place -= 1
    text.place += 1
    yield Argued(text.text[told : text.place])


def _rest(text: Growing) -> Reading[None]:
    """What follows the arguments, other members and the end; a model may forget the end."""
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
        raise Broken
    return found


def _object(found: Any, written: str) -> str:
    """The JSON of an object that may stand in a string."""
    if isinstance(found, dict):
        return written
    if not isinstance(found, str):
        raise Broken
    try:
        inner = json.loads(found)
    except (ValueError, RecursionError) as error:
        raise Broken from error
    if not isinstance(inner, dict):
        raise Broken
    return found

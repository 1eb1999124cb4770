"""Calls as JSON: {"name": "f", "arguments": {...}}, as Qwen3 and Llama 3 write them.

Owns the order in which members may come. What the model wrote of the arguments is told as it is,
to the space, so that the same text can be given back to it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from luceasync.text.answer.growing import Argued, Begun, Broken, Growing, Reading
from luceasync.text.answer.json_values import key, value

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

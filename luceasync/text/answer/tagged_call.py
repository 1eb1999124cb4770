"""Calls as tags: each argument between two of them, its value as plain text.

Qwen3.5 and Qwen3-Coder write <function=f><parameter=a>; GLM and Laguna <arg_key> and <arg_value>.
Owns where a value ends, and the JSON that is made of it: its types are those of the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.growing import Argued, Begun, Broken, Growing, Reading

CALL_END = "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
MAX_NAME_CHARS = 256


def read_function(text: Growing, schemas: ToolSchemas) -> Reading[None]:
    """<function=f> <parameter=a> value </parameter> ... </function>, each on lines of its own."""
    yield from text.take(FUNCTION)
    name = _name((yield from text.until(">", MAX_NAME_CHARS)))
    yield Begun(name)
    arguments = _Arguments(name, schemas)
    while True:
        yield from text.skip()
        word = yield from text.take(PARAMETER, FUNCTION_END, CALL_END)
        if word != PARAMETER:
            yield Argued(arguments.end())
            return
        argument = _name((yield from text.until(">", MAX_NAME_CHARS)))
        value = yield from _value(text, PARAMETER_END, (PARAMETER, FUNCTION_END, CALL_END))
        yield Argued(arguments.add(argument, _without_lines_around(value)))


def read_keyed(text: Growing, schemas: ToolSchemas) -> Reading[None]:
    """f <arg_key>a</arg_key> <arg_value>value</arg_value> ... </tool_call>."""
    name = yield from _name_before(text, (KEY, CALL_END))
    yield Begun(name)
    arguments = _Arguments(name, schemas)
    while True:
        yield from text.skip()
        if (yield from text.take(KEY, CALL_END)) == CALL_END:
            yield Argued(arguments.end())
            return
        argument = _name((yield from text.until(KEY_END, MAX_NAME_CHARS)))
        yield from text.skip()
        yield from text.take(VALUE)
        value = yield from _value(text, VALUE_END, (KEY, CALL_END))
        yield Argued(arguments.add(argument, value))


class _Arguments:
    """The JSON object that a call's arguments become, part by part."""

    def __init__(self, tool: str, schemas: ToolSchemas) -> None:
        self._tool = tool
        self._schemas = schemas
        self._names: set[str] = set()

    def add(self, name: str, text: str) -> str:
        """One more argument. Raises Broken for one that was there."""
        if name in self._names:
            raise Broken
        lead = ", " if self._names else "{"
        self._names.add(name)
        value = self._schemas.value(self._tool, name, text)
        return (
            lead
            + json.dumps(name, ensure_ascii=False)
            + ": "
            + json.dumps(value, ensure_ascii=False)
        )

    def end(self) -> str:
        """No more follow."""
        return "}" if self._names else "{}"


def _value(text: Growing, end: str, following: Sequence[str]) -> Reading[str]:
    """What stands before the `end` that one of `following` follows: a value may hold others."""
    begin = text.place
    while True:
        yield from text.until(end)
        last = text.place - len(end)
        yield from text.skip()
        if (yield from text.stands(following, text.place)) is not None:
            return text.text[begin:last]
        text.place = last + len(end)


def _name_before(text: Growing, words: Sequence[str]) -> Reading[str]:
    """The name that stands before the first of `words`."""
    begin = text.place
    while True:
        end = text.text.find("<", begin)
        seen = len(text.text) if end < 0 else end
        if seen - begin > MAX_NAME_CHARS:
            raise Broken
        if end >= 0:
            if (yield from text.stands(words, end)) is None:
                raise Broken
            text.place = end
            return _name(text.text[begin:end])
        yield from text.more()


def _name(written: str) -> str:
    name = written.strip()
    if not name or any(char in name for char in '<>\n"'):
        raise Broken
    return name


def _without_lines_around(value: str) -> str:
    """The template puts the value on lines of its own."""
    return value.removeprefix("\n").removesuffix("\n")

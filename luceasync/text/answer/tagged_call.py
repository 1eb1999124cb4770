"""Tool calls as tags, with each argument's value as plain text between two of them.

Qwen3.5 and Qwen3-Coder write <function=f><parameter=a>; GLM and Laguna <arg_key> and <arg_value>.
Owns where a value ends, and the JSON made of it, whose types follow the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.growing_text import (
    ArgumentsText,
    CallName,
    FormatMismatch,
    GrowingText,
    Reading,
)

CALL_END = "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
MAX_NAME_CHARS = 256


def read_function(text: GrowingText, schemas: ToolSchemas) -> Reading[None]:
    """<function=f> <parameter=a> value </parameter> ... </function>, each on lines of its own."""
    yield from text.take(FUNCTION)
    name = _name((yield from text.until(">", MAX_NAME_CHARS)))
    yield CallName(name)
    arguments = _Arguments(name, schemas)
    while True:
        yield from text.skip()
        word = yield from text.take(PARAMETER, FUNCTION_END, CALL_END)
        if word != PARAMETER:
            yield ArgumentsText(arguments.end())
            return
        argument = _name((yield from text.until(">", MAX_NAME_CHARS)))
        value = yield from _value(text, PARAMETER_END, (PARAMETER, FUNCTION_END, CALL_END))
        yield ArgumentsText(arguments.add(argument, _without_lines_around(value)))


def read_keyed(text: GrowingText, schemas: ToolSchemas) -> Reading[None]:
    """f <arg_key>a</arg_key> <arg_value>value</arg_value> ... </tool_call>."""
    name = yield from _name_before(text, (KEY, CALL_END))
    yield CallName(name)
    arguments = _Arguments(name, schemas)
    while True:
        yield from text.skip()
        if (yield from text.take(KEY, CALL_END)) == CALL_END:
            yield ArgumentsText(arguments.end())
            return
        argument = _name((yield from text.until(KEY_END, MAX_NAME_CHARS)))
        yield from text.skip()
        yield from text.take(VALUE)
        value = yield from _value(text, VALUE_END, (KEY, CALL_END))
        yield ArgumentsText(arguments.add(argument, value))


class _Arguments:
    """Builds the JSON object of a call's arguments, part by part."""

    def __init__(self, tool: str, schemas: ToolSchemas) -> None:
        self._tool = tool
        self._schemas = schemas
        self._names: set[str] = set()

    def add(self, name: str, text: str) -> str:
        """The part for one more argument. Raises FormatMismatch for a repeated name."""
        if name in self._names:
            raise FormatMismatch
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
        """The last part."""
        return "}" if self._names else "{}"


def _value(text: GrowingText, end: str, following: Sequence[str]) -> Reading[str]:
    """The text before an `end` that is followed by one of `following`: a value may contain other
    `end`s.
    """
    begin = text.place
    while True:
        yield from text.until(end)
        last = text.place - len(end)
        yield from text.skip()
        if (yield from text.peek(following, text.place)) is not None:
            return text.text[begin:last]
        text.place = last + len(end)


def _name_before(text: GrowingText, words: Sequence[str]) -> Reading[str]:
    """The name before the first of `words`."""
    begin = text.place
    while True:
        end = text.text.find("<", begin)
        seen = len(text.text) if end < 0 else end
        if seen - begin > MAX_NAME_CHARS:
            raise FormatMismatch
        if end >= 0:
            if (yield from text.peek(words, end)) is None:
                raise FormatMismatch
            text.place = end
            return _name(text.text[begin:end])
        yield from text.more()


def _name(written: str) -> str:
    name = written.strip()
    if not name or any(char in name for char in '<>\n"'):
        raise FormatMismatch
    return name


def _without_lines_around(value: str) -> str:
    """The template puts the value on lines of its own."""
    return value.removeprefix("\n").removesuffix("\n")

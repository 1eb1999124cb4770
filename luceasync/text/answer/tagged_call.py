"""Tool calls as tags, with each argument's value as plain text between two tags.

Qwen3.5 and Qwen3-Coder write <function=f><parameter=a>; GLM and Laguna <arg_key> and <arg_value>.
Owns where a value ends, and its conversion to JSON by the tool's schema.
"""
# ruff: noqa: RUF001 - DeepSeek's tags contain such characters

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from luceasync.text.answer import json_call
from luceasync.text.answer.argument_types import ToolSchemas, json_text, parsed_json
from luceasync.text.answer.growing_text import (
    EndOfText,
    FormatMismatch,
    GrowingText,
    Reading,
    WrittenCall,
)

MAX_NAME_CHARS = 256
# DeepSeek's attributes of values.
AS_STRING, AS_JSON = 'string="true"', 'string="false"'


@dataclass(frozen=True, slots=True)
class TagWords:
    """The tags of one notation; "" for tags that it lacks.

    A call is `call`, functions, `call_end`. A function is `function`, its name, `name_end`,
    parameters, `function_end`; without `function`, the name follows `call`, and the first parameter
    ends it. A parameter is `parameter`, its name, `parameter_name_end`, attributes up to ">" if it
    `has_attributes`, `value`, the value, `parameter_end`.
    """

    call: str
    call_end: str
    function: str
    name_end: str
    function_end: str
    parameter: str
    parameter_name_end: str
    parameter_end: str
    value: str = ""
    has_attributes: bool = False
    following: tuple[str, ...] = field(init=False)
    ends: re.Pattern[str] = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        following = tuple(w for w in (self.parameter, self.function_end, self.call_end) if w)
        words = sorted({self.parameter_end, *following}, key=len, reverse=True)
        object.__setattr__(self, "following", following)
        object.__setattr__(self, "ends", re.compile("|".join(map(re.escape, words))))
        object.__setattr__(self, "longest", len(words[0]))


QWEN = TagWords(
    call="<tool_call>",
    call_end="</tool_call>",
    function="<function=",
    name_end=">",
    function_end="</function>",
    parameter="<parameter=",
    parameter_name_end=">",
    parameter_end="</parameter>",
)
GLM = TagWords(
    call="<tool_call>",
    call_end="</tool_call>",
    function="",
    name_end="",
    function_end="",
    parameter="<arg_key>",
    parameter_name_end="</arg_key>",
    parameter_end="</arg_value>",
    value="<arg_value>",
)
MINIMAX = TagWords(
    call="<minimax:tool_call>",
    call_end="</minimax:tool_call>",
    function='<invoke name="',
    name_end='">',
    function_end="</invoke>",
    parameter='<parameter name="',
    parameter_name_end='">',
    parameter_end="</parameter>",
)
SEED = replace(QWEN, call="<seed:tool_call>", call_end="</seed:tool_call>")
MINICPM = TagWords(
    call="",
    call_end="",
    function='<function name="',
    name_end='">',
    function_end="</function>",
    parameter='<param name="',
    parameter_name_end='">',
    parameter_end="</param>",
)
DSML = TagWords(
    call="<｜DSML｜function_calls>",
    call_end="</｜DSML｜function_calls>",
    function='<｜DSML｜invoke name="',
    name_end='">',
    function_end="</｜DSML｜invoke>",
    parameter='<｜DSML｜parameter name="',
    parameter_name_end='"',
    parameter_end="</｜DSML｜parameter>",
    has_attributes=True,
)
DSML_V4 = replace(DSML, call="<｜DSML｜tool_calls>", call_end="</｜DSML｜tool_calls>")


def read_functions(
    text: GrowingText, schemas: ToolSchemas, words: TagWords
) -> Reading[list[WrittenCall]]:
    """One or more functions; leaves what follows them."""
    calls = [(yield from read_function(text, schemas, words))]
    while True:
        end = text.place
        try:
            yield from text.skip()
            if (yield from text.peek((words.function,), text.place)) is None:
                break
            calls.append((yield from read_function(text, schemas, words)))
        except (FormatMismatch, EndOfText):
            break
    text.place = end
    return calls


def read_function(text: GrowingText, schemas: ToolSchemas, words: TagWords) -> Reading[WrittenCall]:
    """A function with its parameters, or with the JSON object of its arguments instead."""
    yield from text.take(words.function)
    name = _name((yield from text.until(words.name_end, MAX_NAME_CHARS)))
    yield from text.skip()
    if text.text.startswith("{", text.place):
        arguments = yield from json_call.arguments_object(text)
        yield from text.may_take(words.function_end)
        return WrittenCall(name, arguments)
    return (yield from _parameters(text, name, schemas, words))


def read_keyed(text: GrowingText, schemas: ToolSchemas, words: TagWords) -> Reading[WrittenCall]:
    """A name, ended by the first parameter or the end of the call, and its parameters."""
    name = yield from _name_before(text, (words.parameter, words.call_end))
    if len(name.split()) > 1 and name not in schemas.by_name:
        raise FormatMismatch  # prose
    return (yield from _parameters(text, name, schemas, words))


def _parameters(
    text: GrowingText, name: str, schemas: ToolSchemas, words: TagWords
) -> Reading[WrittenCall]:
    arguments = _Arguments(name, schemas)
    while True:
        yield from text.skip()
        word = yield from text.peek(words.following, text.place)
        if word is None:
            raise FormatMismatch
        if word != words.parameter:
            if word == words.function_end:  # the end of the call does not end the function
                text.place += len(word)
            return WrittenCall(name, arguments.text)
        text.place += len(word)
        argument = yield from _parameter_name(text, words)
        attributes = (yield from _attributes(text)) if words.has_attributes else ""
        if words.value:
            yield from text.skip()
            yield from text.take(words.value)
        value = yield from _value(text, words, arguments)
        if attributes == AS_JSON:
            arguments.add_json(argument, value)
        else:
            arguments.add(argument, value, is_string=attributes == AS_STRING)


def _attributes(text: GrowingText) -> Reading[str]:
    found = (yield from text.until(">", MAX_NAME_CHARS)).strip()
    if found not in (AS_STRING, AS_JSON, ""):
        raise FormatMismatch
    return found


def _parameter_name(text: GrowingText, words: TagWords) -> Reading[str]:
    return _name((yield from text.until(words.parameter_name_end, MAX_NAME_CHARS)))


class _Arguments:
    """Builds the JSON object of a call's arguments."""

    def __init__(self, tool: str, schemas: ToolSchemas) -> None:
        self._tool = tool
        self._schemas = schemas
        self._members: dict[str, str] = {}

    @property
    def text(self) -> str:
        """The object, as JSON."""
        return "{" + ", ".join(f"{json_text(k)}: {v}" for k, v in self._members.items()) + "}"

    def add(self, name: str, text: str, *, is_string: bool = False) -> None:
        """Add an argument, with the type in the tool's schema unless it `is_string`. Raises
        FormatMismatch for a repeated name.
        """
        value = text if is_string else self._schemas.value(self._tool, name, text)
        self._add(name, json_text(value))

    def add_json(self, name: str, text: str) -> None:
        """Add an argument that is JSON; if it is not valid, as a string."""
        try:
            self._add(name, json_text(parsed_json(text)))
        except (ValueError, RecursionError):
            self.add(name, text)

    def may_be_next(self, name: str) -> bool:
        """Whether an argument `name` can follow: the tool has it, and it has not been
        written yet.
        """
        properties = self._schemas.by_name.get(self._tool, {}).get("properties")
        return name not in self._members and (not properties or name in properties)

    def _add(self, name: str, value: str) -> None:
        if name in self._members:
            raise FormatMismatch
        self._members[name] = value


def _value(text: GrowingText, words: TagWords, arguments: _Arguments) -> Reading[str]:
    """The text of the value, without the line ends that a template puts around it.

    A value may contain tags: it ends at a `parameter_end` that is followed by the next tag. If
    there is none, the next parameter or the end of the function ends it.
    """
    begin = searched = text.place
    has_end = False
    while True:
        found = words.ends.search(text.text, searched)
        if found is None:
            searched = max(begin, len(text.text) - words.longest + 1)
            yield from text.more()
            continue
        value = text.text[begin : found.start()]
        if found[0] == words.parameter_end:
            if (yield from _follows(text, found.end(), words.following)):
                text.place = found.end()
                return value if words.value else _without_lines_around(value)
            has_end = True
        elif found[0] == words.parameter:
            if (yield from _is_next(text, found.end(), words, arguments)):
                text.place = found.start()
                return _without_lines_around(value)
        elif not has_end and (yield from _is_end(text, found.start(), words)):
            text.place = found.start()
            return _without_lines_around(value)
        searched = found.end()


def _is_next(
    text: GrowingText, place: int, words: TagWords, arguments: _Arguments
) -> Reading[bool]:
    """Whether the parameter tag before `place` begins the next argument, rather than being part of
    a value: its name can follow, and its own value has a proper end.
    """
    before, text.place = text.place, place
    try:
        name = yield from _parameter_name(text, words)
        if not arguments.may_be_next(name):
            return False
        if words.value:
            yield from text.skip()
            yield from text.take(words.value)
        searched = text.place
        while True:
            found = words.ends.search(text.text, searched)
            if found is None:
                searched = max(searched, len(text.text) - words.longest + 1)
                yield from text.more()
            elif found[0] == words.parameter_end:
                return (yield from _follows(text, found.end(), words.following))
            elif found[0] != words.parameter and (yield from _is_end(text, found.start(), words)):
                return True
            else:
                searched = found.end()
    except FormatMismatch:
        return False
    finally:
        text.place = before


def _is_end(text: GrowingText, place: int, words: TagWords) -> Reading[bool]:
    """Whether the tag at `place`, which does not follow the end of a value, ends the function."""
    word = yield from text.peek(words.following, place)
    assert word is not None, "it was found"
    place += len(word)
    if word == words.function_end and words.call_end:
        return (yield from _follows(text, place, (words.call_end,)))
    try:
        return (yield from _follows(text, place, (words.call or words.function,)))
    except EndOfText:
        return text.text.endswith("\n", 0, place - len(word))


def _follows(text: GrowingText, place: int, following: Sequence[str]) -> Reading[bool]:
    """Whether one of `following` is at `place`, after whitespace. Raises EndOfText if the text
    ends.
    """
    before, text.place = text.place, place
    try:
        yield from text.skip()
        return (yield from text.peek(following, text.place)) is not None
    finally:
        text.place = before


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
    """`value` without the line ends that the template puts around it."""
    return value.removeprefix("\n").removesuffix("\n")

"""Tool calls as JSON: {"name": "f", "arguments": {...}}, alone, in a list, or one after another.

Owns what a model may leave out or reorder. Arguments are passed on exactly as the model wrote them,
including whitespace, so that a later prompt can repeat the same text.
"""
# ruff: noqa: RUF001 - DeepSeek's tags contain such characters

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from luceasync.text.answer.argument_types import ToolSchemas, json_text, parsed_json
from luceasync.text.answer.growing_text import (
    EndOfText,
    FormatMismatch,
    GrowingText,
    Reading,
    WrittenCall,
)

_SPECIAL = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_LITERAL = re.compile(r"[^\s,:{}\[\]\"<|]*")
_NAME = re.compile(r"\s*(?:functions\.)?([^\s<>\[\]{}\"]+?)(?::\d+)?\s*")  # Kimi's: functions.f:0
_ID = re.compile(r"[^\s<>\[\]{}\"]*")
MAX_NAME_CHARS = 256
MAX_LITERAL_CHARS = 512  # no number is longer
NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")


def value(text: GrowingText) -> Reading[tuple[Any, str]]:
    """The JSON value at this point (RFC 8259), and its text: as written, unless strings in it
    contain line ends that must be escaped in JSON. Raises FormatMismatch for anything else.
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
    begin = text.place
    name, written = yield from value(text)
    if written != text.text[begin : text.place]:
        raise FormatMismatch  # contains a line end: the string was never closed
    yield from text.skip()
    yield from text.take(":")
    assert isinstance(name, str), "it begins with a quote"
    return name


def arguments_object(text: GrowingText) -> Reading[str]:
    """The JSON object of a call's arguments; null and the empty string mean no arguments, and a
    string may contain the object. Raises FormatMismatch for any other value.
    """
    found, written = yield from value(text)
    return _object(found, written)


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
    """The end of the object or list that begins here. Whether its brackets match is checked when it
    is parsed.
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
            return parsed_json(written), written
        except json.JSONDecodeError:
            found = parsed_json(written, strict=False)
            return found, json_text(found)
    except (ValueError, RecursionError) as error:
        raise FormatMismatch from error


def read_calls(text: GrowingText, known: Sequence[str] | None = None) -> Reading[list[WrittenCall]]:
    """The calls of a list, or of consecutive objects. Raises FormatMismatch if the first is not a
    call, or, if `known` is given, for the name of a tool that it does not contain.
    """
    yield from text.skip()
    if text.text.startswith("[", text.place):
        return (yield from read_list(text, known))
    calls = [(yield from read_object(text, known))]
    while True:
        end = text.place
        try:
            yield from text.may_take(",", ";")
            yield from text.skip()
            if not text.text.startswith("{", text.place):
                break
            calls.append((yield from read_object(text, known)))
        except (FormatMismatch, EndOfText):
            break
    text.place = end
    return calls


def read_list(text: GrowingText, known: Sequence[str] | None = None) -> Reading[list[WrittenCall]]:
    """[{...}, {...}], with at least one call."""
    return (yield from _list_of(text, lambda each: read_object(each, known)))


def read_by_name(text: GrowingText) -> Reading[list[WrittenCall]]:
    """[{"f": {...}}, {"g": {...}}], with at least one call: the keys are the names of tools."""
    return (yield from _list_of(text, _read_by_name))


def _read_by_name(text: GrowingText) -> Reading[WrittenCall]:
    yield from text.take("{")
    name = _name((yield from key(text)), None)
    arguments = yield from arguments_object(text)
    yield from text.skip()
    yield from text.take("}")
    return WrittenCall(name, arguments)


def _list_of(
    text: GrowingText, read_one: Callable[[GrowingText], Reading[WrittenCall]]
) -> Reading[list[WrittenCall]]:
    yield from text.take("[")
    calls = []
    while True:
        yield from text.skip()
        calls.append((yield from read_one(text)))
        yield from text.skip()
        if (yield from text.take(",", "]")) == "]":
            return calls


def read_object(text: GrowingText, known: Sequence[str] | None = None) -> Reading[WrittenCall]:
    """The object of a call, whose closing brace may be missing. Raises FormatMismatch, also for the
    name of a tool that is not in `known`, if given.
    """
    yield from text.take("{")
    name: str | None = None
    arguments: str | None = None
    own_id = ""
    while True:
        member = yield from key(text)
        if member in NAMES and name is None:
            name = _name((yield from value(text))[0], known)
        elif member in ARGUMENTS and arguments is None:
            arguments = yield from arguments_object(text)
        else:
            found, _ = yield from value(text)
            if member == "id" and isinstance(found, str) and _ID.fullmatch(found[:MAX_NAME_CHARS]):
                own_id = found[:MAX_NAME_CHARS]
        is_whole = name is not None and arguments is not None
        word = yield from text.may_take(",", "}")
        if word is None and not is_whole:
            yield from text.skip()  # raises EndOfText if nothing follows
            raise FormatMismatch
        if word != ",":
            break
    if name is None:
        raise FormatMismatch
    return WrittenCall(name, "{}" if arguments is None else arguments, own_id)


def read_answer(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
    """The calls that make up the rest of `text`: an object, several in a row, or a list of them,
    each with just the name of a tool and then arguments that its schema allows. Raises
    FormatMismatch as soon as the text cannot be any of these, and EndOfText.
    """
    yield from text.skip()
    is_list = (yield from text.peek(("[",), text.place)) is not None
    read_one = partial(_read_exact, schemas=schemas)
    calls = yield from _list_of(text, read_one) if is_list else _row_of(text, read_one)
    try:
        yield from text.skip()
    except EndOfText:
        return calls
    raise FormatMismatch


def _row_of(
    text: GrowingText, read_one: Callable[[GrowingText], Reading[WrittenCall]]
) -> Reading[list[WrittenCall]]:
    """One or more calls, with whitespace between them, up to the end of the text."""
    calls = []
    while True:
        calls.append((yield from read_one(text)))
        try:
            yield from text.skip()
        except EndOfText:
            return calls


def _read_exact(text: GrowingText, schemas: ToolSchemas) -> Reading[WrittenCall]:
    """The object of a call with its members in order, and arguments that match the
    tool's schema.
    """
    yield from text.take("{")
    yield from _member(text, '"name"')
    name = _name((yield from value(text))[0], tuple(schemas.by_name))
    yield from text.skip()
    yield from text.take(",")
    yield from _member(text, *(f'"{word}"' for word in ARGUMENTS))
    arguments, written = yield from value(text)
    yield from text.skip()
    yield from text.take("}")
    if not isinstance(arguments, dict) or not schemas.fits(name, arguments):
        raise FormatMismatch
    return WrittenCall(name, written)


def _member(text: GrowingText, *keys: str) -> Reading[None]:
    """Consume one of `keys`, in quotes, and its colon."""
    yield from text.skip()
    yield from text.take(*keys)
    yield from text.skip()
    yield from text.take(":")


@dataclass(frozen=True, slots=True)
class NameWords:
    """Words around calls that are a name and the JSON object of its arguments; "" for words that a
    notation lacks. All calls are written as `section`, the calls, `section_end`; each call as
    `call`, its name, `name_end`, the object, `call_end`. `id_word` separates the name from the
    call's id, which follows the name, or precedes it with `id_first`.
    """

    section: str
    call: str
    name_end: str
    call_end: str
    section_end: str
    id_word: str = ""
    id_first: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        """The possible beginnings of calls."""
        return tuple(word for word in (self.section, self.call) if word)

    def name_in(self, header: str) -> tuple[str, str]:
        """The name in the text between `call` and `name_end`, and the id or "". Raises
        FormatMismatch for an invalid id.
        """
        if not self.id_word or self.id_word not in header:
            return header, ""
        before, _, after = header.partition(self.id_word)
        name, call_id = (after, before) if self.id_first else (before, after)
        if _ID.fullmatch(call_id.strip()) is None:
            raise FormatMismatch
        return name, call_id.strip()


MISTRAL = NameWords("", "[TOOL_CALLS]", "[ARGS]", "", "", id_word="[CALL_ID]")
KIMI = NameWords(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
DEEPSEEK = NameWords(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
DEEPSEEK_V3 = replace(
    DEEPSEEK,
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    name_end="\n```json\n",
    call_end="\n```<｜tool▁call▁end｜>",
)
FUNCTION = NameWords("", "<function=", ">", "</function>", "")
SOLAR = NameWords(
    "<|tool_calls|>",
    "<|tool_call:begin|>",
    "<|tool_call:args|>",
    "<|tool_call:end|>",
    "<|calls|>",
    id_word="<|tool_call:name|>",
    id_first=True,
)


def read_named(text: GrowingText, words: NameWords) -> Reading[list[WrittenCall]]:
    """One or more calls; leaves what follows them."""
    if words.section:
        yield from text.may_take(words.section)
        yield from text.skip()
    calls = [(yield from _read_named(text, words))]
    while True:
        end = text.place
        try:
            yield from text.skip()
            calls.append((yield from _read_named(text, words)))
        except (FormatMismatch, EndOfText):
            break
    text.place = end
    if words.section_end:
        yield from text.may_take(words.section_end)
    return calls


def _read_named(text: GrowingText, words: NameWords) -> Reading[WrittenCall]:
    yield from text.take(words.call)
    header = yield from text.until(words.name_end, MAX_NAME_CHARS)
    name, own_id = words.name_in(header)
    found = _NAME.fullmatch(name)
    if found is None:
        raise FormatMismatch
    yield from text.skip()
    if not text.text.startswith("{", text.place):
        raise FormatMismatch
    arguments = yield from arguments_object(text)
    if words.call_end:
        yield from text.may_take(words.call_end.lstrip())
    return WrittenCall(found[1], arguments, own_id)


def _name(found: Any, known: Sequence[str] | None) -> str:
    if not isinstance(found, str) or not found or not found.isprintable():
        raise FormatMismatch
    if known is not None and found not in known:
        raise FormatMismatch
    return found


def object_of(text: str) -> str:
    """The JSON object that is the whole `text`, as read by `arguments_object`. Raises
    FormatMismatch.
    """
    return _object(*_parsed(text.strip()))


def written(call: WrittenCall) -> str:
    """A call as an object that `read_object` can read."""
    return f'{{"name": {json_text(call.name)}, "arguments": {call.arguments}}}'


def _object(found: Any, written: str) -> str:
    """The JSON text of an object, which may be inside a string."""
    if isinstance(found, dict):
        return written
    if found is None:
        return "{}"
    if not isinstance(found, str):
        raise FormatMismatch
    if not found.strip():
        return "{}"
    inner, written = _parsed(found)
    if not isinstance(inner, dict):
        raise FormatMismatch
    return written

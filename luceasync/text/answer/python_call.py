"""Tool calls in Python syntax, [f(a="b", n=1)], and in Gemma's, call:f{a:<|"|>b<|"|>}.

Owns their literals, which become JSON. Llama 4 and LFM2 write the former.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from luceasync.text.answer.argument_types import CallReader, ToolSchemas, json_text
from luceasync.text.answer.growing_text import (
    FormatMismatch,
    GrowingText,
    Reading,
    WrittenCall,
)

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LITERAL = re.compile(r"[A-Za-z]+")
_LITERALS = {"True": True, "true": True, "False": False, "false": False}
_NULLS = ("None", "null")
_SPACE = re.compile(r"\s*")
MAX_DEPTH = 64
MAX_NAME_CHARS = 256
GEMMA_QUOTES = ('<|"|>', "<escape>")


def read_list(text: GrowingText, known: Sequence[str] | None = None) -> Reading[list[WrittenCall]]:
    """[f(...), g(...)], with at least one call. Raises FormatMismatch for anything else, also for
    the name of a tool that is not in `known`, if given.
    """
    yield from text.take("[")
    calls = []
    while True:
        yield from text.skip()
        calls.append((yield from read_call(text, known)))
        yield from text.skip()
        if (yield from text.take(",", "]")) == "]":
            return calls


def read_lines(text: GrowingText, end: str) -> Reading[list[WrittenCall]]:
    """At least one call, each on its own line, up to `end`, which is consumed."""
    calls = []
    while (yield from text.may_take(end)) is None:
        yield from text.skip()
        calls.append((yield from read_call(text)))
    if not calls:
        raise FormatMismatch
    return calls


def read_call(text: GrowingText, known: Sequence[str] | None = None) -> Reading[WrittenCall]:
    """f(a="b", n=1)."""
    name = yield from _name_before(text, "(")
    if known is not None and name not in known:
        raise FormatMismatch
    body = yield from _balanced(text, ("'", '"'))
    return WrittenCall(name, _object(_Literals(body, ('"', "'")).arguments()))


def read_gemma(text: GrowingText) -> Reading[WrittenCall]:
    """call:f{a:<|"|>b<|"|>,n:1}."""
    yield from text.take("call:")
    name = yield from _name_before(text, "{")
    body = yield from _balanced(text, (*GEMMA_QUOTES, '"'))
    return WrittenCall(name, _object(_Literals(body, (*GEMMA_QUOTES, '"')).object()))


def lines_between(begin: Sequence[str], end: Sequence[str]) -> CallReader:
    """Reads calls in Python syntax, one per line, after the words of `begin` and up to the first of
    `end`, whose other words may be missing.
    """

    def read(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
        for word in begin:
            yield from text.skip()
            yield from text.take(word)
        calls = yield from read_lines(text, end[0])
        for word in end[1:]:
            yield from text.may_take(word)
        return calls

    return read


def gemma_between(opening: str, end: str) -> CallReader:
    """Reads a call in Gemma's syntax between two words; the second may be missing."""

    def read(text: GrowingText, schemas: ToolSchemas) -> Reading[list[WrittenCall]]:
        yield from text.take(opening)
        yield from text.skip()
        call = yield from read_gemma(text)
        yield from text.may_take(end)
        return [call]

    return read


def _object(arguments: dict[str, Any]) -> str:
    try:
        return json_text(arguments)
    except (ValueError, RecursionError) as error:
        raise FormatMismatch from error


def _name_before(text: GrowingText, word: str) -> Reading[str]:
    begin = text.place
    while True:
        found = _NAME.match(text.text, begin)
        if found is None and len(text.text) > begin:
            raise FormatMismatch
        if found is not None and found.end() < len(text.text):
            if not text.text.startswith(word, found.end()):
                raise FormatMismatch
            text.place = found.end()
            return found[0]
        if len(text.text) - begin > MAX_NAME_CHARS:
            raise FormatMismatch
        yield from text.more()


def _balanced(text: GrowingText, quotes: Sequence[str]) -> Reading[str]:
    """Consume and return the text from the bracket at this point to the one that closes it."""
    # A quote within <|"|> does not delimit a string.
    words = re.compile("|".join([r"[()\[\]{}]", *(rf"(?<!<\|){re.escape(q)}" for q in quotes)]))
    begin, depth = text.place, 0
    place = begin
    longest = max(map(len, quotes))
    while True:
        found = words.search(text.text, place)
        if found is None:
            place = max(place, len(text.text) - longest + 1)
            yield from text.more()
            continue
        place = found.end()
        if found[0] in quotes:
            place = yield from _string_end(text, place, found[0])
            continue
        depth += 1 if found[0] in "([{" else -1
        if depth == 0:
            text.place = place
            return text.text[begin:place]


def _string_end(text: GrowingText, place: int, quote: str) -> Reading[int]:
    """The index after the next unescaped `quote`; longer quotes have no escapes."""
    while True:
        end = text.text.find(quote, place)
        escape = text.text.find("\\", place) if len(quote) == 1 else -1
        if escape < 0 or 0 <= end < escape:
            if end >= 0:
                return end + len(quote)
            place = max(place, len(text.text) - len(quote) + 1)
        elif escape + 1 < len(text.text):
            place = escape + 2
            continue
        else:
            place = escape
        yield from text.more()


class _Literals:
    """Parses text that consists of literals. `quotes` are the delimiters of strings."""

    def __init__(self, text: str, quotes: Sequence[str]) -> None:
        self._text = text
        self._place = 0
        self._quotes = quotes
        self._depth = 0

    def arguments(self) -> dict[str, Any]:
        """(a=1, b="x"), as the whole text. Raises FormatMismatch."""
        return self._members("(", ")", "=")

    def object(self) -> dict[str, Any]:
        """{a: 1, "b": "x"}, as the whole text. Raises FormatMismatch."""
        return self._members("{", "}", ":")

    def _members(self, begin: str, end: str, colon: str) -> dict[str, Any]:
        self._take(begin)
        found: dict[str, Any] = {}
        while not self._takes(end):
            if found:
                self._take(",")
                if self._takes(end):
                    break
            name = self._key()
            self._take(colon)
            if name in found:
                raise FormatMismatch
            found[name] = self._value()
        return found

    def _key(self) -> str:
        return self._string() if self._at_quote() else self._match(_NAME)

    def _value(self) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise FormatMismatch
        try:
            if self._at_quote():
                return self._string()
            if self._at("{"):
                return self.object()
            if self._at("["):
                return self._items("[", "]")
            if self._at("("):
                return self._items("(", ")")
            if _NUMBER.match(self._text, self._skip()):
                return self._number(self._match(_NUMBER))
            word = self._match(_LITERAL)
            if word in _NULLS:
                return None
            return _LITERALS[word] if word in _LITERALS else _mismatch()
        finally:
            self._depth -= 1

    def _items(self, begin: str, end: str) -> list[Any]:
        self._take(begin)
        found: list[Any] = []
        while not self._takes(end):
            if found:
                self._take(",")
                if self._takes(end):
                    break
            found.append(self._value())
        return found

    def _number(self, written: str) -> int | float:
        try:
            return float(written) if set(written) & set(".eE") else int(written)
        except ValueError as error:  # thousands of digits
            raise FormatMismatch from error

    def _string(self) -> str:
        quote = next(q for q in self._quotes if self._at(q))
        begin = self._place
        self._place += len(quote)
        if len(quote) > 1:
            end = self._text.find(quote, self._place)
            if end < 0:
                raise FormatMismatch
            content, self._place = self._text[self._place : end], end + len(quote)
            return content
        while self._place < len(self._text) and self._text[self._place] != quote:
            self._place += 2 if self._text[self._place] == "\\" else 1
        self._place += 1
        return _unquoted(self._text[begin : self._place])

    def _skip(self) -> int:
        found = _SPACE.match(self._text, self._place)
        assert found is not None, "it matches the empty text"
        self._place = found.end()
        return self._place

    def _at(self, word: str) -> bool:
        return self._text.startswith(word, self._skip())

    def _at_quote(self) -> bool:
        return any(self._at(quote) for quote in self._quotes)

    def _takes(self, word: str) -> bool:
        is_here = self._at(word)
        self._place += len(word) if is_here else 0
        return is_here

    def _take(self, word: str) -> None:
        if not self._takes(word):
            raise FormatMismatch

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._skip())
        if found is None:
            raise FormatMismatch
        self._place = found.end()
        return found[0]


def _mismatch() -> NoReturn:
    raise FormatMismatch


_ESCAPE = re.compile(
    r"\\(?:\n|[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-3]?[0-7]{1,2})"
)


def _unquoted(written: str) -> str:
    """The value of a Python string literal in one pair of quotes. Unknown escapes, and line ends in
    it, are kept unchanged.
    """

    def char(escape: re.Match[str]) -> str:
        found: str = ast.literal_eval(f"'{escape[0]}'")
        return found

    try:
        text = _ESCAPE.sub(char, written[1:-1])
    except (ValueError, SyntaxError) as error:
        raise FormatMismatch from error
    # JSON's escapes write some characters as surrogate pairs.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

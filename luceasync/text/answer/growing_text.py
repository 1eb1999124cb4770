"""A text that grows while it is parsed, and ways to wait for more of it.

Parsers are generators: they yield to wait for more text, and return what they have read. Owns the
position in the text. Independent of formats.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A complete tool call; `arguments` is the text of a JSON object. `own_id`: its id, as far as
    the model has written one.
    """

    name: str
    arguments: str
    own_id: str = ""


Reading = Generator[None, None, Result]


class FormatMismatch(Exception):
    """The text does not match its format."""


class EndOfText(Exception):
    """The text ended within something that it began."""


class GrowingText:
    """The text of an answer so far, parsed up to `place`; complete once `is_last`."""

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        self.is_last = False

    def grow(self, text: str, *, is_last: bool) -> None:
        """Append `text`."""
        self.text += text
        self.is_last = is_last

    def forget(self) -> None:
        """Drop the text that has been parsed."""
        self.text, self.place = self.text[self.place :], 0

    def more(self) -> Reading[None]:
        """Wait for more text. Raises EndOfText if there is none."""
        if self.is_last:
            raise EndOfText
        yield None

    def skip(self, chars: str | None = None) -> Reading[None]:
        """Skip `chars`, by default whitespace. Raises EndOfText if nothing follows."""
        while True:
            rest = self.text[self.place :]
            self.place += len(rest) - len(rest.lstrip(chars))
            if self.place < len(self.text):
                return
            yield from self.more()

    def peek(self, words: Sequence[str], place: int) -> Reading[str | None]:
        """The word of `words` at `place`, or None; consumes nothing. No word of `words` may be a
        prefix of another.
        """
        while True:
            for word in words:
                if self.text.startswith(word, place):
                    return word
            seen = self.text[place:]
            if not any(word.startswith(seen) for word in words):
                return None
            yield from self.more()

    def take(self, *words: str) -> Reading[str]:
        """Consume one of `words` and return it. Raises FormatMismatch if none of them
        comes next.
        """
        word = yield from self.peek(words, self.place)
        if word is None:
            raise FormatMismatch
        self.place += len(word)
        return word

    def may_take(self, *words: str) -> Reading[str | None]:
        """Consume one of `words`, with the whitespace before it. Returns None, and consumes
        nothing, if none of them comes next. Text that ends within one of them is consumed.
        """
        begin = self.place
        try:
            yield from self.skip()
            word = yield from self.peek(words, self.place)
        except EndOfText:
            self.place = begin if self.place == len(self.text) else len(self.text)
            return None
        self.place = begin if word is None else self.place + len(word)
        return word

    def until(self, word: str, max_chars: int | None = None) -> Reading[str]:
        """The text before the next `word`; consumes both. Raises FormatMismatch if it is longer
        than `max_chars`.
        """
        begin = searched = self.place
        while True:
            end = self.text.find(word, searched)
            num_before = (end if end >= 0 else len(self.text) - len(word) + 1) - begin
            if max_chars is not None and num_before > max_chars:
                raise FormatMismatch
            if end >= 0:
                self.place = end + len(word)
                return self.text[begin:end]
            searched = max(begin, len(self.text) - len(word) + 1)
            yield from self.more()


def num_safe(text: str, words: Sequence[str]) -> int:
    """How many characters of `text`, which contains none of `words`, cannot be part of an
    incomplete one.
    """
    longest = max(map(len, words), default=1)
    for begin in range(max(0, len(text) - longest + 1), len(text)):
        if any(word.startswith(text[begin:]) for word in words):
            return begin
    return len(text)


def first_of(text: str, words: Sequence[str], begin: int = 0) -> tuple[int, str] | None:
    """The index of the first of `words` in `text` from `begin` on, and that word; the longest if
    several begin there.
    """
    found = [(place, -len(word), word) for word in words if (place := text.find(word, begin)) >= 0]
    if not found:
        return None
    place, _, word = min(found)
    return place, word

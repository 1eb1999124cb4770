"""A text that grows while somebody reads it, and the ways to wait for more of it.

Readers are generators: they yield what they have found, or None to wait. Owns the place that they
have reached. Knows no format.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Begun:
    """A call of the tool `name` begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """A part of a call's arguments: a piece of a JSON object that is whole with the others."""

    text: str


Found = Begun | Argued
Reading = Generator[Found | None, None, Result]


class Broken(Exception):
    """The text is not what its format says."""


class Cut(Exception):
    """The text ended before what was begun in it."""


class Growing:
    """`text`, which ends where the answer does once `is_last`; read up to `place`."""

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        self.is_last = False

    def grow(self, text: str, *, is_last: bool) -> None:
        """`text` follows."""
        self.text += text
        self.is_last = is_last

    def forget(self) -> None:
        """Let go of what was read."""
        self.text, self.place = self.text[self.place :], 0

    def more(self) -> Reading[None]:
        """Wait for more of it. Raises Cut where none comes."""
        if self.is_last:
            raise Cut
        yield None

    def skip(self, chars: str | None = None) -> Reading[None]:
        """To the next character that is none of `chars`, or no space. Raises Cut at the end."""
        while True:
            rest = self.text[self.place :]
            self.place += len(rest) - len(rest.lstrip(chars))
            if self.place < len(self.text):
                return
            yield from self.more()

    def stands(self, words: Sequence[str], place: int) -> Reading[str | None]:
        """The word that stands at `place`, of words none of which begins another; None if none
        does. Nothing is taken.
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
        """The word of `words` that stands here. Raises Broken where none does."""
        word = yield from self.stands(words, self.place)
        if word is None:
            raise Broken
        self.place += len(word)
        return word

    def until(self, word: str, most_chars: int | None = None) -> Reading[str]:
        """What stands before the next `word`, which is taken too. Raises Broken where that is
        more than `most_chars`.
        """
        begin = searched = self.place
        while True:
            end = self.text.find(word, searched)
            num_before = (end if end >= 0 else len(self.text) - len(word) + 1) - begin
            if most_chars is not None and num_before > most_chars:
                raise Broken
            if end >= 0:
                self.place = end + len(word)
                return self.text[begin:end]
            searched = max(begin, len(self.text) - len(word) + 1)
            yield from self.more()


# How much of a growing text must wait for what follows. Owns the arithmetic of ends that may
# become beginnings. Knows no format.


def num_safe(text: str, words: Sequence[str]) -> int:
    """How many characters of `text`, which holds none of `words`, cannot belong to one of them
    that is not complete yet.
    """
    longest = max(map(len, words), default=1)
    for begin in range(max(0, len(text) - longest + 1), len(text)):
        if any(word.startswith(text[begin:]) for word in words):
            return begin
    return len(text)


def first_of(text: str, words: Sequence[str], begin: int = 0) -> tuple[int, str] | None:
    """Where the first of `words` stands in `text` from `begin` on, and which; the longest one where
    several begin there.
    """
    found = [(place, -len(word), word) for word in words if (place := text.find(word, begin)) >= 0]
    if not found:
        return None
    place, _, word = min(found)
    return place, word

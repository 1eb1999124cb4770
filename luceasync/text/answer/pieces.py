"""The growing text of one answer becomes typed pieces, whatever parts it comes in.

Owns what is held back, and until when. What turns out to be no call is given as the text that it
is; a call of which something was told stays unfinished where its text breaks off.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from luceasync.request import ArgumentsPiece, CallPiece, Piece, ReasoningPiece, TextPiece
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.formats import CallFormat
from luceasync.text.answer.growing import (
    Argued,
    Begun,
    Broken,
    Cut,
    Found,
    Growing,
    Reading,
    first_of,
    num_safe,
)

Result = TypeVar("Result")
PieceReading = Generator[Piece | None, None, Result]

THINK, THINK_END = "<think>", "</think>"


class _Opening(NamedTuple):
    """`word` stands at character `begin`; the space before it begins at `space`."""

    space: int
    begin: int
    word: str


def new_call_id() -> str:
    """A name for a call that no other one has."""
    return f"call_{secrets.token_hex(12)}"


class AnswerPieces:
    """See luceasync.text.answer.pieces.PieceMaker.

    `reasons`: reasoning between <think> and </think>, at the answer's beginning, is told as such;
    `is_reasoning`: the prompt has opened it. `calls`: how the model writes calls; None: it was
    given no tools, and all is text. `max_calls`: what follows that many is not told.
    """

    def __init__(
        self,
        *,
        reasons: bool = True,
        is_reasoning: bool = False,
        calls: CallFormat | None = None,
        schemas: ToolSchemas | None = None,
        max_calls: int | None = None,
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._text = Growing()
        self._calls = calls
        self._schemas = schemas or ToolSchemas()
        self._max_calls = max_calls
        self._call_id = call_id
        self._num_calls = 0
        self._has_text = False
        self._is_cut = False
        self._reading = self._read(reasons=reasons, is_reasoning=is_reasoning)

    def make(self, text: str, *, is_last: bool, is_cut: bool = False) -> tuple[Piece, ...]:
        """See PieceMaker."""
        self._is_cut = is_cut
        self._text.grow(text, is_last=is_last)
        pieces: list[Piece] = []
        for piece in self._reading:
            if piece is None:
                break
            pieces.append(piece)
        return _joined(pieces)

    def _read(self, *, reasons: bool, is_reasoning: bool) -> PieceReading[None]:
        """All pieces; None where more text is wanted. It ends with the answer."""
        try:
            if is_reasoning or (reasons and (yield from self._opens_reasoning())):
                yield from self._reasoning()
            while True:
                opening = yield from self._text_before_call()
                yield from self._call(opening)
        except Cut:
            return

    def _opens_reasoning(self) -> PieceReading[bool]:
        """Whether the answer begins with reasoning, which the model opens itself."""
        text = self._text
        while True:
            rest = text.text.lstrip()
            if rest.startswith(THINK):
                text.place = len(text.text) - len(rest) + len(THINK)
                return True
            if text.is_last or not THINK.startswith(rest):
                return False
            yield None

    def _reasoning(self) -> PieceReading[None]:
        """Up to the end of it; the lines around it are the template's."""
        text = self._text
        yield from _waiting(text.skip("\n"))
        while (end := text.text.find(THINK_END, text.place)) < 0:
            safe = text.text[text.place : self._num_safe((THINK_END,))]
            said = safe if text.is_last else safe.rstrip()
            if said:
                yield ReasoningPiece(said)
            text.place += len(said)
            text.forget()
            yield from _waiting(text.more())
        if said := text.text[text.place : end].rstrip("\n"):
            yield ReasoningPiece(said)
        text.place = end + len(THINK_END)
        yield from _waiting(text.skip("\n"))

    def _text_before_call(self) -> PieceReading[_Opening]:
        """The text up to where a call may begin, but for the space before it."""
        text = self._text
        while True:
            openings = self._openings
            found = first_of(text.text, openings, text.place)
            end = found[0] if found else self._num_safe(openings)
            said = text.text[text.place : end]
            if openings and (found or not text.is_last):
                said = said.rstrip()
            if said:
                yield TextPiece(said)
                self._has_text = True
                text.place += len(said)
            if found and self._openings:  # there may be none any more
                return _Opening(text.place, *found)
            if not found:
                text.forget()
                yield from _waiting(text.more())

    def _call(self, opening: _Opening) -> PieceReading[None]:
        """The call that may begin there."""
        assert self._calls is not None, "a format has openings"
        text, has_begun, told = self._text, False, opening.begin
        text.place = opening.begin
        try:
            for found in self._calls.read(text, self._schemas):
                if found is None:
                    yield None
                    continue
                has_begun, told = True, text.place
                if self._max_calls is None or self._num_calls < self._max_calls:
                    yield self._piece(found)
        except Broken:
            if not has_begun:
                text.place = opening.begin + len(opening.word)
                yield TextPiece(text.text[opening.space : text.place])
                self._has_text = True
                return
            text.place = told
        except Cut:
            if not has_begun and not (self._is_cut and not self._calls.only_first):
                yield TextPiece(text.text[opening.space :])
            raise
        self._num_calls += 1
        text.forget()
        yield from _waiting(text.skip())

    def _piece(self, found: Found) -> Piece:
        match found:
            case Begun(name):
                return CallPiece(self._num_calls, self._call_id(), name)
            case Argued(part):
                return ArgumentsPiece(self._num_calls, part)

    @property
    def _openings(self) -> tuple[str, ...]:
        """What a call may begin with here."""
        if self._calls is None or (self._calls.only_first and self._has_text):
            return ()
        return self._calls.openings

    def _num_safe(self, words: Sequence[str]) -> int:
        """Up to where all is certain; of what was cut off a tag's beginning is not told, if it is
        more than one character.
        """
        text = self._text
        safe = max(text.place, num_safe(text.text, words))
        is_tag = self._is_cut and len(text.text) - safe > 1
        return safe if is_tag or not text.is_last else len(text.text)


def _waiting(reading: Reading[None]) -> PieceReading[None]:
    """A reading that finds nothing to tell."""
    for _ in reading:
        yield None


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Neighbours of one type as one."""
    joined: list[Piece] = []
    for piece in pieces:
        match joined[-1] if joined else None, piece:
            case TextPiece(before), TextPiece(after):
                joined[-1] = TextPiece(before + after)
            case ReasoningPiece(before), ReasoningPiece(after):
                joined[-1] = ReasoningPiece(before + after)
            case ArgumentsPiece(index, before), ArgumentsPiece(same, after) if index == same:
                joined[-1] = ArgumentsPiece(index, before + after)
            case _:
                joined.append(piece)
    return tuple(joined)


# The text of one choice becomes typed pieces: what an API family shows of it, and as what. Owns
# what a part of the text is. Knows no tokens, no stop strings and no API.


class PieceMaker(Protocol):
    """Parts the growing text of one choice; one maker serves one choice."""

    def make(self, text: str, *, is_last: bool, is_cut: bool = False) -> tuple[Piece, ...]:
        """The pieces that are certain with `text`, which follows what was given before. What may
        yet turn out to be of another type is held back, unless `text` `is_last`. `is_cut`: it is,
        and the model would have said more: a call that has just begun is not told then.
        """
        ...


class PlainText:
    """All of it is the answer's text; nothing is held back."""

    def make(self, text: str, *, is_last: bool, is_cut: bool = False) -> tuple[Piece, ...]:
        """See PieceMaker."""
        return (TextPiece(text),) if text else ()

"""Splits the text of one answer into typed pieces as it grows.

Owns what is held back, and until when. What turns out not to be a call becomes text; a call of
which something was already emitted stays unfinished where its text breaks off.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from luceasync.request import ArgumentsPiece, CallPiece, Piece, ReasoningPiece, TextPiece
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.call_formats import CallFormat
from luceasync.text.answer.growing_text import (
    ArgumentsText,
    CallName,
    CallPart,
    EndOfText,
    FormatMismatch,
    GrowingText,
    Reading,
    first_of,
    num_safe,
)

Result = TypeVar("Result")
PieceReading = Generator[Piece | None, None, Result]

THINK, THINK_END = "<think>", "</think>"


class PieceMaker(Protocol):
    """Splits the growing text of one choice into typed pieces; one maker per choice."""

    def make(self, text: str, *, is_last: bool, is_cut: bool = False) -> tuple[Piece, ...]:
        """The pieces that are final once `text` is appended. Text whose type may still change is
        held back, unless `is_last`. `is_cut`: it is the last, but the model would have written
        more; a call that has just begun is then dropped.
        """
        ...


class PlainText:
    """A PieceMaker for which everything is text; holds nothing back."""

    def make(self, text: str, *, is_last: bool, is_cut: bool = False) -> tuple[Piece, ...]:
        return (TextPiece(text),) if text else ()


class _Opening(NamedTuple):
    """`word` is at character `begin`; the whitespace before it begins at `space`."""

    space: int
    begin: int
    word: str


def new_call_id() -> str:
    """A unique id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


class AnswerPieces:
    """A PieceMaker that separates reasoning and tool calls from text.

    `reasons`: text between <think> and </think> at the beginning of the answer is reasoning;
    `is_reasoning`: the prompt has opened it. `calls`: the format of tool calls; None: there are no
    tools, and all is text. `max_calls`: further calls are dropped.
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
        self._text = GrowingText()
        self._calls = calls
        self._schemas = schemas or ToolSchemas()
        self._max_calls = max_calls
        self._call_id = call_id
        self._num_calls = 0
        self._has_text = False
        self._is_cut = False
        self._reading = self._read(reasons=reasons, is_reasoning=is_reasoning)

    def make(self, text: str, *, is_last: bool, is_cut: bool = False) -> tuple[Piece, ...]:
        self._is_cut = is_cut
        self._text.grow(text, is_last=is_last)
        pieces: list[Piece] = []
        for piece in self._reading:
            if piece is None:
                break
            pieces.append(piece)
        return _joined(pieces)

    def _read(self, *, reasons: bool, is_reasoning: bool) -> PieceReading[None]:
        """Yield all pieces of the answer, and None to wait for more text."""
        try:
            if is_reasoning or (reasons and (yield from self._opens_reasoning())):
                yield from self._reasoning()
            while True:
                opening = yield from self._text_before_call()
                yield from self._call(opening)
        except EndOfText:
            return

    def _opens_reasoning(self) -> PieceReading[bool]:
        """Whether the answer begins with reasoning that the model opens itself."""
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
        """Yield the reasoning, without the line ends around it, which are the template's."""
        text = self._text
        yield from _waiting(text.skip("\n"))
        while (end := text.text.find(THINK_END, text.place)) < 0:
            safe = text.text[text.place : self._num_safe((THINK_END,))]
            piece = safe if text.is_last else safe.rstrip()
            if piece:
                yield ReasoningPiece(piece)
            text.place += len(piece)
            text.forget()
            yield from _waiting(text.more())
        if piece := text.text[text.place : end].rstrip("\n"):
            yield ReasoningPiece(piece)
        text.place = end + len(THINK_END)
        yield from _waiting(text.skip("\n"))

    def _text_before_call(self) -> PieceReading[_Opening]:
        """Yield the text up to where a call may begin, without the whitespace before it."""
        text = self._text
        while True:
            openings = self._openings
            found = first_of(text.text, openings, text.place)
            end = found[0] if found else self._num_safe(openings)
            piece = text.text[text.place : end]
            if openings and (found or not text.is_last):
                piece = piece.rstrip()
            if piece:
                yield TextPiece(piece)
                self._has_text = True
                text.place += len(piece)
            if found and self._openings:  # the text may have ruled calls out
                return _Opening(text.place, *found)
            if not found:
                text.forget()
                yield from _waiting(text.more())

    def _call(self, opening: _Opening) -> PieceReading[None]:
        """Yield the call at `opening`, or its text if it is none."""
        assert self._calls is not None, "only a format has openings"
        text, has_begun, emitted = self._text, False, opening.begin
        text.place = opening.begin
        try:
            for found in self._calls.read(text, self._schemas):
                if found is None:
                    yield None
                    continue
                has_begun, emitted = True, text.place
                if self._max_calls is None or self._num_calls < self._max_calls:
                    yield self._piece(found)
        except FormatMismatch:
            if not has_begun:
                text.place = opening.begin + len(opening.word)
                yield TextPiece(text.text[opening.space : text.place])
                self._has_text = True
                return
            text.place = emitted
        except EndOfText:
            if not has_begun and not (self._is_cut and not self._calls.only_first):
                yield TextPiece(text.text[opening.space :])
            raise
        self._num_calls += 1
        text.forget()
        yield from _waiting(text.skip())

    def _piece(self, found: CallPart) -> Piece:
        match found:
            case CallName(name):
                return CallPiece(self._num_calls, self._call_id(), name)
            case ArgumentsText(part):
                return ArgumentsPiece(self._num_calls, part)

    @property
    def _openings(self) -> tuple[str, ...]:
        """What a call may begin with at this point."""
        if self._calls is None or (self._calls.only_first and self._has_text):
            return ()
        return self._calls.openings

    def _num_safe(self, words: Sequence[str]) -> int:
        """The index up to which the text is final. Of an answer that was cut off, the beginning of
        a tag is not emitted if it is longer than one character.
        """
        text = self._text
        safe = max(text.place, num_safe(text.text, words))
        is_tag = self._is_cut and len(text.text) - safe > 1
        return safe if is_tag or not text.is_last else len(text.text)


def _waiting(reading: Reading[None]) -> PieceReading[None]:
    """Run a reading that yields no pieces."""
    for _ in reading:
        yield None


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Merge neighbouring pieces of one type."""
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

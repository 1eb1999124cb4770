"""Splits the text of one answer into typed pieces as it grows.

One state machine for all formats of calls. Nothing is emitted before its type is certain: calls are
emitted whole, and what turns out not to be a call becomes text. Owns what is held back, and until
when.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

from luceasync.request import ArgumentsPiece, CallPiece, Piece, ReasoningPiece, TextPiece
from luceasync.text.answer import json_call
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.call_formats import CallFormat
from luceasync.text.answer.growing_text import (
    EndOfText,
    FormatMismatch,
    GrowingText,
    WrittenCall,
    first_of,
    num_safe,
)

Result = TypeVar("Result")
PieceReading = Generator[Piece | None, None, Result]


@dataclass(frozen=True, slots=True)
class ReasoningWords:
    """The words that a model writes around its reasoning, and around the text that follows.

    `after` and `lead` separate reasoning from the text of the answer; `lead` also precedes text
    without reasoning. `answer` and `answer_end` are optional words around the text, not part of it.
    `has_channels`: an answer consists of messages in channels.
    """

    begin: str = "<think>"
    end: str = "</think>"
    after: str = ""
    lead: str = ""
    answer: str = ""
    answer_end: str = ""
    has_channels: bool = False


THINK = ReasoningWords()
# Reasoning before the text of an answer: none, opened by the prompt, or possibly opened by the
# answer itself.
Before = Literal["nothing", "open", "perhaps"]
MAX_UNFINISHED = 64  # calls without an end; after these, the rest of an answer is text


class PieceMaker(Protocol):
    """Splits the growing text of one choice into typed pieces; one maker per choice."""

    def make(self, text: str, *, is_last: bool) -> tuple[Piece, ...]:
        """The pieces that are final once `text` is appended. Text whose type may still change is
        held back, unless `is_last`.
        """
        ...


class PlainText:
    """A PieceMaker for which everything is text; holds nothing back."""

    def make(self, text: str, *, is_last: bool) -> tuple[Piece, ...]:
        return (TextPiece(text),) if text else ()


class _Opening(NamedTuple):
    """A call may begin with `word` at character `begin`; the text before it ends at `space`."""

    space: int
    begin: int
    word: str


def new_call_id() -> str:
    """A unique id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


class AnswerPieces:
    """A PieceMaker that separates reasoning and tool calls from text.

    `reasons`: text between the two of `words` at the beginning of the answer is reasoning;
    `is_reasoning`: the prompt has opened it. `calls` is the format of tool calls; None: there are
    no tools, and everything is text. `max_calls`: further calls become text, as JSON objects.
    `reads_json`: in every format, a text that consists only of the JSON of calls is these calls.

    A complete call within reasoning is part of the reasoning, but becomes a call if the answer
    never ends its reasoning. Whitespace around calls is kept only between two texts.
    """

    def __init__(
        self,
        *,
        reasons: bool = True,
        is_reasoning: bool = False,
        words: ReasoningWords = THINK,
        calls: CallFormat | None = None,
        schemas: ToolSchemas | None = None,
        max_calls: int | None = None,
        reads_json: bool = True,
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._text = GrowingText()
        self._words = words
        self._answer_end = words.answer_end if reasons or is_reasoning else ""
        self._calls = calls
        self._schemas = schemas or ToolSchemas()
        self._max_calls = max_calls
        self._reads_json = reads_json and calls is not None and not calls.only_first
        self._call_id = call_id
        self._num_calls = 0
        self._num_unfinished = 0
        self._has_text = False
        self._is_after_call = False
        self._space = ""  # around the calls since the last text
        self._reading = self._read(reasons=reasons, is_reasoning=is_reasoning)

    def make(self, text: str, *, is_last: bool) -> tuple[Piece, ...]:
        self._text.grow(text, is_last=is_last)
        pieces: list[Piece] = []
        for piece in self._reading:
            if piece is None:
                break
            pieces.append(piece)
        return joined(pieces)

    def _read(self, *, reasons: bool, is_reasoning: bool) -> PieceReading[None]:
        """Yield all pieces of the answer, and None to wait for more text."""
        try:
            if is_reasoning or (reasons and (yield from self._begins_with(self._words.begin))):
                yield from self._reasoning()
            if self._words.answer and (is_reasoning or reasons):
                yield from self._begins_with(self._words.answer)
            if self._reads_json and (yield from self._is_json_of_calls()):
                return
            while True:
                opening = yield from self._text_before_call()
                if opening.word == self._answer_end:
                    yield from self._end_or_text(opening)
                else:
                    yield from self._call_or_text(opening)
        except EndOfText:
            return

    def _is_json_of_calls(self) -> PieceReading[bool]:
        """Whether the rest of the answer is the JSON of calls, which are then yielded. Known at the
        end, or as soon as it is false.
        """
        begin = self._text.place
        try:
            calls = yield from json_call.read_answer(self._text, self._schemas)
        except (FormatMismatch, EndOfText):
            self._text.place = begin
            return False
        for call in calls:
            yield from self._called(call)
        return True

    def _begins_with(self, word: str) -> PieceReading[bool]:
        """Consume `word` if it comes next. Returns whether it did."""
        text = self._text
        while True:
            rest = text.text[text.place :].lstrip()
            if rest.startswith(word):
                text.place = len(text.text) - len(rest) + len(word)
                return True
            if text.is_last or not word.startswith(rest):
                return False
            yield None

    def _reasoning(self) -> PieceReading[None]:
        """Yield the reasoning, without the line ends around it, which the template inserts. Stops
        after it, or at a call in reasoning that does not end.
        """
        text = self._text
        yield from text.skip("\n")
        searched = text.place  # openings before this index begin no call
        while True:
            words = (self._words.end, *self._openings)
            found = first_of(text.text, words, searched)
            if found is None:
                end = max(searched, self._num_safe(words))
                piece = text.text[text.place :] if text.is_last else self._upto(end).rstrip()
                yield from self._reasoned(piece)
                searched = end - text.place
                text.forget()
                yield from text.more()
            elif found[1] == self._words.end:
                yield from self._reasoned(self._upto(found[0]).rstrip("\n"))
                text.place = found[0] + len(self._words.end)
                yield from text.skip("\n")
                return
            else:
                yield from self._reasoned(self._upto(found[0]).rstrip())
                if (yield from self._is_call_in_reasoning(found[0])):
                    text.place = found[0]
                    return
                searched = found[0] + len(found[1])

    def _upto(self, end: int) -> str:
        return self._text.text[self._text.place : end]

    def _reasoned(self, piece: str) -> PieceReading[None]:
        """Yield `piece` of the reasoning, which comes next."""
        if piece:
            yield ReasoningPiece(piece)
            self._text.place += len(piece)

    def _is_call_in_reasoning(self, begin: int) -> PieceReading[bool]:
        """Whether a complete call begins at `begin`, and the reasoning never ends. Waits until that
        is certain; leaves the position in the text unchanged.
        """
        assert self._calls is not None, "only a format has openings"
        text, end = self._text, self._words.end
        place, text.place = text.place, begin
        searched, is_whole = begin, False
        reading = self._calls.read(text, self._schemas)
        try:
            while end not in text.text[searched:]:
                searched = max(begin, len(text.text) - len(end) + 1)
                if not is_whole:
                    try:
                        next(reading)
                    except StopIteration:
                        is_whole = True
                        continue
                elif text.is_last:
                    return True
                yield None
        except (FormatMismatch, EndOfText) as error:
            self._num_unfinished += isinstance(error, EndOfText)
        finally:
            reading.close()  # it may change the position as it ends
            text.place = place
        return False

    def _text_before_call(self) -> PieceReading[_Opening]:
        """Yield the text up to a possible call, without the whitespace before it."""
        text = self._text
        while True:
            openings = (*self._openings, *filter(None, [self._answer_end]))
            found = first_of(text.text, openings, text.place)
            end = found[0] if found else self._num_safe(openings)
            if text.is_last and not found:
                end = len(text.text)
            piece = text.text[text.place : end]
            if openings and (found or not text.is_last):
                piece = piece.rstrip()
            if piece:
                yield from self._said(text.place + len(piece))
            if found and (self._openings or found[1] == self._answer_end):
                return _Opening(text.place, *found)  # otherwise the text has ruled calls out
            if not found:
                text.forget()
                yield from text.more()

    def _said(self, end: int) -> PieceReading[None]:
        """Yield the text up to `end`, separated from earlier text as the model separated them."""
        text = self._text
        piece = text.text[text.place : end]
        text.place = end
        if self._is_after_call:
            piece = self._space + piece if piece.strip() and self._has_text else piece.lstrip()
        if piece:
            self._space, self._is_after_call = "", False
            yield TextPiece(piece)
            self._has_text = True

    def _end_or_text(self, opening: _Opening) -> PieceReading[None]:
        """Drop the word at the end of the answer, or yield it if more text follows."""
        text = self._text
        end = text.place = opening.begin + len(opening.word)
        yield from text.skip()
        calls = self._openings
        if calls and (yield from text.peek(calls, text.place)) is not None:
            return
        text.place = opening.space
        yield from self._said(end)

    def _call_or_text(self, opening: _Opening) -> PieceReading[None]:
        """Yield the calls at `opening`, or its word if none begins there."""
        assert self._calls is not None, "only a format has openings"
        text = self._text
        text.place = opening.begin
        try:
            calls = yield from self._calls.read(text, self._schemas)
        except (FormatMismatch, EndOfText) as error:
            text.place = opening.space
            self._num_unfinished += isinstance(error, EndOfText)
            yield from self._said(opening.begin + len(opening.word))
            return
        self._space += text.text[opening.space : opening.begin]
        self._is_after_call = True
        for call in calls:
            yield from self._called(call)
        text.forget()

    def _called(self, call: WrittenCall) -> PieceReading[None]:
        """Yield the call, or its text if the maximum number of calls is reached."""
        index = self._num_calls
        self._num_calls += 1
        if self._max_calls is None or index < self._max_calls:
            yield CallPiece(index, self._call_id(), call.name, call.own_id)
            yield ArgumentsPiece(index, call.arguments)
            return
        self._space = ""
        is_parted = self._has_text or index > self._max_calls
        yield TextPiece(("\n" if is_parted else "") + json_call.written(call))

    @property
    def _openings(self) -> tuple[str, ...]:
        """The words that a call may begin with at this point."""
        if self._calls is None or (self._calls.only_first and self._has_text):
            return ()
        if self._num_unfinished > MAX_UNFINISHED:
            return ()
        return self._calls.openings

    def _num_safe(self, words: Sequence[str]) -> int:
        """The index up to which no text can be part of an incomplete word of `words`."""
        return max(self._text.place, num_safe(self._text.text, words))


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Merge neighbouring pieces of one type."""
    joined: list[Piece] = []
    for piece in pieces:
        match joined[-1] if joined else None, piece:
            case TextPiece(before), TextPiece(after):
                joined[-1] = TextPiece(before + after)
            case ReasoningPiece(before), ReasoningPiece(after):
                joined[-1] = ReasoningPiece(before + after)
            case _:
                joined.append(piece)
    return tuple(joined)

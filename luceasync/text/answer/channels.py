"""Splits an answer that consists of messages in channels, as in OpenAI's Harmony, into pieces.

Source: OpenAI, harmony response format. Owns the interpretation of headers: whom a message is for.
Independent of tokens and templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, TypeVar

from luceasync.request import ArgumentsPiece, CallPiece, Piece, ReasoningPiece, TextPiece
from luceasync.text.answer import json_call
from luceasync.text.answer.argument_types import ToolSchemas
from luceasync.text.answer.growing_text import (
    EndOfText,
    FormatMismatch,
    GrowingText,
    WrittenCall,
    first_of,
    num_safe,
)
from luceasync.text.answer.pieces import joined, new_call_id

Result = TypeVar("Result")

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
HEADER_WORDS = (START, CHANNEL, MESSAGE, "to=")
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
BODY_ENDS = (*MESSAGE_ENDS, START, CHANNEL)
ANALYSIS, FUNCTIONS = "analysis", "functions."
SEPARATOR = "\n\n"  # between the texts of two messages
MAX_HEADER_CHARS = 512
_HEADER = re.compile(
    r"\s*(?:<\|start\|>\w*)?(?:\s*to=[^\s<]+)?(?:<\|channel\|>\s*[\w-]*)?(?:\s*to=[^\s<]+)?"
    r"\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
)
_CUT_HEADER = re.compile(r"\s*(?:<[^\s<>]*>?[\w.=-]* ?){0,3}(?:to=\S*)?\s*")
_CHANNEL = re.compile(r"<\|channel\|>\s*([\w-]*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class MessageHeader(NamedTuple):
    """The beginning of a message in a channel, as `written`. `recipient` is set for a call, else
    "".
    """

    written: str = ""
    channel: str = ""
    recipient: str = ""

    @classmethod
    def of(cls, written: str) -> MessageHeader:
        channel, recipient = _CHANNEL.search(written), _RECIPIENT.search(written)
        return cls(written, channel[1] if channel else "", recipient[1] if recipient else "")

    @property
    def is_text(self) -> bool:
        """Whether the message is for the user."""
        return self.channel != ANALYSIS and not self.recipient


class MessagePart(NamedTuple):
    """A part of an answer: of a message's body or, with `header` None, of the text around messages.
    `is_begin`: it is the first part of its message.
    """

    header: MessageHeader | None
    text: str
    is_begin: bool = False


_PartReading = Generator[MessagePart | None, None, Result]


class ChannelMessages:
    """Splits an answer into messages in the notation of OpenAI's Harmony: <|channel|>, name,
    <|message|>, body, <|end|>, <|start|>, role and so on.

    The concatenated parts are equal to the answer.
    """

    def __init__(self, opened: MessageHeader | None = None) -> None:
        """`opened` is the header of the message that the prompt has begun."""
        self._text = GrowingText()
        self._reading = self._read(opened)

    def parts(self, text: str, *, is_last: bool) -> list[MessagePart]:
        """The parts that are final once `text` is appended."""
        self._text.grow(text, is_last=is_last)
        found: list[MessagePart] = []
        for part in self._reading:
            if part is None:
                break
            found.append(part)
        return found

    def _read(self, header: MessageHeader | None) -> _PartReading[None]:
        try:
            while True:
                if header is None:
                    header = yield from self._header()
                yield from self._body(header)
                header = None
        except EndOfText:
            if rest := self._text.text[self._text.place :]:  # of a header
                yield MessagePart(None, rest)

    def _header(self) -> _PartReading[MessageHeader]:
        """The header at this point; an empty one if text follows without a header."""
        written = yield from self._written_header()
        if written is None:
            return MessageHeader()
        self._text.place += len(written)
        yield MessagePart(None, written)
        return MessageHeader.of(written)

    def _written_header(self) -> _PartReading[str | None]:
        """The header that begins here, without consuming it; None if none begins here. Raises
        EndOfText for a header that is cut off.
        """
        text = self._text
        begin = text.place
        try:
            yield from text.skip()
            if (yield from text.peek(HEADER_WORDS, text.place)) is None:
                return None
            yield from text.until(MESSAGE, MAX_HEADER_CHARS)
            written = text.text[begin : text.place]
            return written if _HEADER.fullmatch(written) else None
        except FormatMismatch:
            return None
        except EndOfText:
            if _CUT_HEADER.fullmatch(text.text, begin):
                raise
            return None
        finally:
            text.place = begin

    def _body(self, header: MessageHeader) -> _PartReading[None]:
        """Yield the body up to, but not including, its end: a word that ends it, or the header of
        the next message.
        """
        text = self._text
        is_begin, searched = True, text.place
        while True:
            found = first_of(text.text, BODY_ENDS, searched)
            end = found[0] if found else max(searched, num_safe(text.text, BODY_ENDS))
            if text.is_last and not found:
                end = len(text.text)
            if is_begin or end > text.place:
                yield MessagePart(header, text.text[text.place : end], is_begin)
                is_begin, text.place = False, end
            if found is None:
                text.forget()
                yield from text.more()
                searched = text.place
            elif found[1] in MESSAGE_ENDS:
                yield MessagePart(None, found[1])
                text.place += len(found[1])
                return
            elif (yield from self._written_header()) is not None:
                return
            else:
                searched = end + len(found[1])


class ChannelPieces:
    """A PieceMaker for answers in channels: reasoning in one channel, calls with a recipient, text
    in the others. Other parts are passed on as text; a header that is cut off is dropped.
    """

    def __init__(
        self,
        *,
        separates: bool = True,
        opened: MessageHeader | None = None,
        schemas: ToolSchemas | None = None,
        max_calls: int | None = None,
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`separates`: separate reasoning; otherwise it is text. `schemas` are those of the tools;
        empty: there are no tools.
        """
        self._messages = ChannelMessages(opened)
        self._separates = separates
        self._schemas = schemas or ToolSchemas()
        self._max_calls = max_calls
        self._call_id = call_id
        self._num_calls = 0
        self._call: tuple[MessageHeader, list[str]] | None = None  # header and body of an open one
        self._has_said: set[type[Piece]] = set()
        self._space = ""  # whitespace before the next text of the open message
        self._is_new = False  # the open message has no text yet

    def make(self, text: str, *, is_last: bool) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        for part in self._messages.parts(text, is_last=is_last):
            if part.header is None or part.is_begin:
                pieces += self._ended_call()
            if part.header is not None:
                pieces += self._part(part.header, part)
        if is_last:
            pieces += self._ended_call()
        return joined(pieces)

    def _part(self, header: MessageHeader, part: MessagePart) -> Iterator[Piece]:
        if self._is_call(header):
            self._call = self._call or (header, [])
            self._call[1].append(part.text)
            return
        raw = header.written if part.is_begin and header.recipient else ""
        if header.channel == ANALYSIS and not header.recipient and self._separates:
            yield from self._said(ReasoningPiece, part.text, is_begin=part.is_begin)
        else:
            yield from self._said(TextPiece, raw + part.text, is_begin=part.is_begin)

    def _said(
        self, kind: type[TextPiece] | type[ReasoningPiece], text: str, *, is_begin: bool
    ) -> Iterator[Piece]:
        """The text, separated from that of an earlier message, without whitespace around the
        message.
        """
        if is_begin:
            self._space = SEPARATOR if kind in self._has_said else ""
            self._is_new = True
        said = text.lstrip() if self._is_new else text
        rest = said.rstrip()
        if rest:
            yield kind(self._space + rest)
            self._has_said.add(kind)
            self._space, self._is_new = "", False
        if not self._is_new:
            self._space += said[len(rest) :]

    def _is_call(self, header: MessageHeader) -> bool:
        known, name = self._schemas.by_name, header.recipient
        return bool(known) and (name.startswith(FUNCTIONS) or name in known)

    def _ended_call(self) -> Iterator[Piece]:
        """The call that was open, or its text if it is not valid."""
        if self._call is None:
            return
        (header, body), self._call = self._call, None
        written = "".join(body)
        try:
            call = WrittenCall(
                header.recipient.removeprefix(FUNCTIONS), json_call.object_of(written)
            )
        except FormatMismatch:
            yield from self._said(TextPiece, header.written + written, is_begin=True)
            return
        if self._max_calls is not None and self._num_calls >= self._max_calls:
            yield from self._said(TextPiece, json_call.written(call), is_begin=True)
            return
        yield CallPiece(self._num_calls, self._call_id(), call.name)
        yield ArgumentsPiece(self._num_calls, call.arguments)
        self._num_calls += 1

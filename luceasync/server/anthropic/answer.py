"""Anthropic's shapes of an answer, streamed and plain.

Source: docs.anthropic.com, Messages and Streaming messages. Owns field names and their order.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from luceasync.errors import RequestError
from luceasync.request import (
    ArgumentsPiece,
    CallPiece,
    Delta,
    Finish,
    ModelCard,
    Piece,
    ReasoningPiece,
    Stream,
    TextPiece,
)
from luceasync.server.answer_stats import LuceasyncBody, TimingsBody, luceasync_of, timings_of
from luceasync.server.failures import Failure
from luceasync.server.fields import cut


class Usage(msgspec.Struct):
    """`input_tokens` were run, `cache_read_input_tokens` were not: together they are the prompt."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class ThinkingBlock(msgspec.Struct):
    """`signature`: what clients send back with it; nothing is signed here."""

    thinking: str
    signature: str
    type: Literal["thinking"] = "thinking"


class ToolUseBlock(msgspec.Struct):
    id: str
    name: str
    input: Any
    type: Literal["tool_use"] = "tool_use"


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Answer(msgspec.Struct):
    """The plain answer, and what an answer begins with."""

    id: str
    model: str
    content: list[AnswerBlock]
    usage: Usage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    timings: TimingsBody | UnsetType = UNSET
    luceasync: LuceasyncBody | UnsetType = UNSET


class MessageStart(msgspec.Struct):
    message: Answer
    type: Literal["message_start"] = "message_start"


class Ping(msgspec.Struct):
    type: Literal["ping"] = "ping"


class BlockStart(msgspec.Struct):
    index: int
    content_block: AnswerBlock
    type: Literal["content_block_start"] = "content_block_start"


class TextDelta(msgspec.Struct):
    text: str
    type: Literal["text_delta"] = "text_delta"


class ThinkingDelta(msgspec.Struct):
    thinking: str
    type: Literal["thinking_delta"] = "thinking_delta"


class SignatureDelta(msgspec.Struct):
    signature: str
    type: Literal["signature_delta"] = "signature_delta"


class InputDelta(msgspec.Struct):
    partial_json: str
    type: Literal["input_json_delta"] = "input_json_delta"


BlockPart = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(msgspec.Struct):
    index: int
    delta: BlockPart
    type: Literal["content_block_delta"] = "content_block_delta"


class BlockStop(msgspec.Struct):
    index: int
    type: Literal["content_block_stop"] = "content_block_stop"


class Ending(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct):
    delta: Ending
    usage: Usage
    timings: TimingsBody
    luceasync: LuceasyncBody
    type: Literal["message_delta"] = "message_delta"


class MessageStop(msgspec.Struct):
    type: Literal["message_stop"] = "message_stop"


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


# Anthropic's error object. Source: docs.anthropic.com, API errors. Owns its fields and the type
# that follows from a status.


TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorObject(msgspec.Struct):
    type: str
    message: str


class ErrorBody(msgspec.Struct):
    """A whole error response, and the data of an error event."""

    error: ErrorObject
    type: Literal["error"] = "error"


def error_body(failure: Failure) -> ErrorBody:
    """`failure` in Anthropic's shape; the words name the field, which has no place of its own."""
    other = "api_error" if failure.status >= 500 else "invalid_request_error"
    return ErrorBody(ErrorObject(TYPES.get(failure.status, other), failure.message))


def unknown_model(name: str, card: ModelCard) -> RequestError:
    """The 404 for a model that is not served."""
    served = " or ".join(card.names)
    message = f"model: {cut(name)} is not served here; this server serves {served}."
    return RequestError(message, param="model", code="model_not_found", status=404)


SIGNATURE = "luceasync"  # some clients drop reasoning that has none


class AnswerEvents:
    """Turns the deltas of one Stream into events, in the order in which they have to be sent."""

    def __init__(self, model: str, num_prompt_tokens: int) -> None:
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._id = f"msg_{random.getrandbits(96):024x}"
        self._num_blocks = 0
        self._open: AnswerBlock | None = None  # the block to which what follows may belong
        self._has_called = False

    async def events(self, stream: Stream) -> AsyncGenerator[Event, None]:
        """All of them. Raises what `stream` raises."""
        has_begun = False
        async for delta in stream:
            if not has_begun:
                has_begun = True
                yield MessageStart(Answer(self._id, self._model, [], self._usage_at_start()))
                yield Ping()
            for event in self._events_of(delta):
                yield event

    def _events_of(self, delta: Delta) -> Iterator[Event]:
        for piece in delta.pieces:
            yield from self._said(piece)
        if delta.finish is not None:
            yield from self._close()
            yield self._message_delta(delta.finish)
            yield MessageStop()

    def _said(self, piece: Piece) -> Iterator[Event]:
        match piece:
            case TextPiece(text):
                if not isinstance(self._open, TextBlock):
                    yield from self._begin(TextBlock(""))
                yield self._delta(TextDelta(text))
            case ReasoningPiece(text):
                if not isinstance(self._open, ThinkingBlock):
                    yield from self._begin(ThinkingBlock("", ""))
                yield self._delta(ThinkingDelta(text))
            case CallPiece(_, call_id, name):
                self._has_called = True
                yield from self._begin(ToolUseBlock(call_id, name, {}))
            case ArgumentsPiece(_, text):
                yield self._delta(InputDelta(text))

    def _begin(self, block: AnswerBlock) -> Iterator[Event]:
        yield from self._close()
        self._open = block
        self._num_blocks += 1
        yield BlockStart(self._num_blocks - 1, block)

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if isinstance(self._open, ThinkingBlock):
            yield self._delta(SignatureDelta(SIGNATURE))
        self._open = None
        yield BlockStop(self._num_blocks - 1)

    def _delta(self, part: BlockPart) -> Event:
        return BlockDelta(self._num_blocks - 1, part)

    def _message_delta(self, finish: Finish) -> MessageDelta:
        finishes = {0: finish}
        return MessageDelta(
            Ending(self._stop_reason(finish), finish.stop),
            _usage(finish),
            timings_of(finishes),
            luceasync_of(finishes),
        )

    def _stop_reason(self, finish: Finish) -> str:
        if finish.reason == "length":
            return "max_tokens"
        if finish.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._has_called else "end_turn"

    def _usage_at_start(self) -> Usage:
        """What was cached is told at the end: nobody has looked yet when the prompt is counted."""
        return Usage(self._num_prompt_tokens, 0)


class AnswerFold:
    """The plain answer that says what the events of one answer say, taken one by one."""

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._parts: list[str] = []

    def take(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case MessageStart(answer):
                self._answer = answer
            case BlockStart(_, block):
                self.answer.content.append(block)
                self._parts = []
            case BlockDelta(_, SignatureDelta(signature)):
                block = self.answer.content[-1]
                assert isinstance(block, ThinkingBlock), "others have no signature"
                block.signature = signature
            case BlockDelta(_, part):
                self._parts.append(_text_of(part))
            case BlockStop():
                self._close("".join(self._parts))
            case MessageDelta(ending, usage, timings, luceasync):
                self.answer.usage = usage
                self.answer.stop_reason = ending.stop_reason
                self.answer.stop_sequence = ending.stop_sequence
                self.answer.timings, self.answer.luceasync = timings, luceasync

    @property
    def answer(self) -> Answer:
        """The answer so far; whole after the last event."""
        assert self._answer is not None, "an answer begins with message_start"
        return self._answer

    def _close(self, said: str) -> None:
        match self.answer.content[-1]:
            case TextBlock() as block:
                block.text = said
            case ThinkingBlock() as block:
                block.thinking = said
            case ToolUseBlock() as block:
                block.input = _arguments(said)


def _text_of(part: BlockPart) -> str:
    match part:
        case TextDelta(text) | ThinkingDelta(text) | InputDelta(text):
            return text
        case SignatureDelta():
            return ""


def _arguments(said: str) -> object:
    """The object; an unfinished one is the text that it is, which no client takes for arguments."""
    try:
        return json.loads(said)
    except ValueError:
        return {"unfinished_arguments": said}


def _usage(finish: Finish) -> Usage:
    cached = finish.usage.cached_tokens
    num_run = finish.usage.prompt_tokens - cached
    return Usage(num_run, finish.usage.completion_tokens, cached)

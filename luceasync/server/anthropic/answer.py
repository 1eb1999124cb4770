"""The events of an answer in Anthropic's API, the plain answer as a fold of them, and errors.

Source: docs.anthropic.com, Messages, Streaming messages, API errors. Owns which event has which
fields, and when it is sent: consecutive pieces of one type make a block.
"""

from __future__ import annotations

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
from luceasync.server.fields import shorten, with_whole_characters


class AnthropicUsage(msgspec.Struct):
    """The prompt: `input_tokens` were prefilled, `cache_read_input_tokens` restored."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class ThinkingBlock(msgspec.Struct):
    """A block of reasoning. Clients send `signature` back; nothing is signed here."""

    thinking: str
    signature: str
    type: Literal["thinking"] = "thinking"


class ToolUseBlock(msgspec.Struct):
    id: str
    name: str
    input: Any
    type: Literal["tool_use"] = "tool_use"


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class AnthropicAnswer(msgspec.Struct):
    """The plain answer, and the content of the first event."""

    id: str
    model: str
    content: list[AnswerBlock]
    usage: AnthropicUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    timings: TimingsBody | UnsetType = UNSET
    luceasync: LuceasyncBody | UnsetType = UNSET


class MessageStart(msgspec.Struct):
    message: AnthropicAnswer
    type: Literal["message_start"] = "message_start"


class PingEvent(msgspec.Struct):
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


DeltaPart = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(msgspec.Struct):
    index: int
    delta: DeltaPart
    type: Literal["content_block_delta"] = "content_block_delta"


class BlockStop(msgspec.Struct):
    index: int
    type: Literal["content_block_stop"] = "content_block_stop"


class StopDelta(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct):
    delta: StopDelta
    usage: AnthropicUsage
    timings: TimingsBody
    luceasync: LuceasyncBody
    type: Literal["message_delta"] = "message_delta"


class MessageStop(msgspec.Struct):
    type: Literal["message_stop"] = "message_stop"


AnthropicEvent = (
    MessageStart | PingEvent | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
)


SIGNATURE = "luceasync"  # some clients drop reasoning without a signature


class AnthropicEvents:
    """Turns the deltas of one Stream into events, in the order of sending."""

    def __init__(self, model: str, num_prompt_tokens: int) -> None:
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._id = f"msg_{random.getrandbits(96):024x}"
        self._num_blocks = 0
        self._open: AnswerBlock | None = None  # the block that the next piece may continue
        self._has_called = False

    async def events(self, stream: Stream) -> AsyncGenerator[AnthropicEvent, None]:
        """All events of the answer. Raises what `stream` raises."""
        has_begun = False
        async for delta in stream:
            if not has_begun:
                has_begun = True
                yield MessageStart(
                    AnthropicAnswer(self._id, self._model, [], self._usage_at_start())
                )
                yield PingEvent()
            for event in self._events_of(delta):
                yield event

    def _events_of(self, delta: Delta) -> Iterator[AnthropicEvent]:
        for piece in delta.pieces:
            yield from self._events_of_piece(piece)
        if delta.finish is not None:
            yield from self._close()
            yield self._message_delta(delta.finish)
            yield MessageStop()

    def _events_of_piece(self, piece: Piece) -> Iterator[AnthropicEvent]:
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
            case ArgumentsPiece(_, text):  # complete arguments: no escape is split
                yield self._delta(InputDelta(with_whole_characters(text.encode()).decode()))

    def _begin(self, block: AnswerBlock) -> Iterator[AnthropicEvent]:
        yield from self._close()
        self._open = block
        self._num_blocks += 1
        yield BlockStart(self._num_blocks - 1, block)

    def _close(self) -> Iterator[AnthropicEvent]:
        if self._open is None:
            return
        if isinstance(self._open, ThinkingBlock):
            yield self._delta(SignatureDelta(SIGNATURE))
        self._open = None
        yield BlockStop(self._num_blocks - 1)

    def _delta(self, part: DeltaPart) -> AnthropicEvent:
        return BlockDelta(self._num_blocks - 1, part)

    def _message_delta(self, finish: Finish) -> MessageDelta:
        finishes = {0: finish}
        return MessageDelta(
            StopDelta(self._stop_reason(finish), finish.stop),
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

    def _usage_at_start(self) -> AnthropicUsage:
        """The usage without cached tokens: the cache is looked up after the prompt is counted."""
        return AnthropicUsage(self._num_prompt_tokens, 0)


class AnthropicFold:
    """Folds the events of one answer into the plain answer."""

    def __init__(self) -> None:
        self._answer: AnthropicAnswer | None = None
        self._parts: list[str] = []

    def take(self, event: AnthropicEvent) -> None:
        """Add the next event."""
        match event:
            case MessageStart(answer):
                self._answer = answer
            case BlockStart(_, block):
                self.answer.content.append(block)
                self._parts = []
            case BlockDelta(_, SignatureDelta(signature)):
                block = self.answer.content[-1]
                assert isinstance(block, ThinkingBlock), "only thinking has a signature"
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
    def answer(self) -> AnthropicAnswer:
        """The answer so far; complete after the last event."""
        assert self._answer is not None, "an answer begins with message_start"
        return self._answer

    def _close(self, text: str) -> None:
        match self.answer.content[-1]:
            case TextBlock() as block:
                block.text = text
            case ThinkingBlock() as block:
                block.thinking = text
            case ToolUseBlock() as block:
                block.input = _arguments(text)


def _text_of(part: DeltaPart) -> str:
    match part:
        case TextDelta(text) | ThinkingDelta(text) | InputDelta(text):
            return text
        case SignatureDelta():
            return ""


def _arguments(text: str) -> object:
    """The arguments as an object. Text that was cut off is kept under a key that no client takes
    for an argument.
    """
    try:
        arguments = msgspec.json.decode(with_whole_characters(text.encode()))
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"unfinished_arguments": text}


def _usage(finish: Finish) -> AnthropicUsage:
    """The usage, with at least one token of the prompt as prefilled: Claude Code takes 0 for
    absent, and would count the whole prompt of `message_start` in addition to the restored tokens.
    """
    num_prefilled = max(1, finish.usage.prompt_tokens - finish.usage.cached_tokens)
    cached = finish.usage.prompt_tokens - num_prefilled
    return AnthropicUsage(num_prefilled, finish.usage.completion_tokens, cached)


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicErrorObject(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """A whole error response, and the data of an error event."""

    error: AnthropicErrorObject
    type: Literal["error"] = "error"


def error_body(failure: Failure) -> AnthropicError:
    """`failure` in Anthropic's form, which names the field only in the message."""
    default = "api_error" if failure.status >= 500 else "invalid_request_error"
    return AnthropicError(
        AnthropicErrorObject(ERROR_TYPES.get(failure.status, default), failure.message)
    )


def check_model(name: str, card: ModelCard) -> None:
    """Raise RequestError, a 404, for a model that is not served."""
    if card.serves(name):
        return
    served = " or ".join(card.names)
    message = f"model: {shorten(name)} is not served here; this server serves {served}."
    raise RequestError(message, param="model", code="model_not_found", status=404)

"""Anthropic's shapes of an answer, streamed and plain.

Source: docs.anthropic.com, Messages and Streaming messages. Owns field names and their order.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from luceasync.errors import RequestError
from luceasync.request import ModelCard
from luceasync.server.checks import cut
from luceasync.server.failures import Failure
from luceasync.server.work import LuceasyncBody, TimingsBody


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

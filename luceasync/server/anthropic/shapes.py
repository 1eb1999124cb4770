"""Anthropic's shapes of an answer, streamed and plain.

Source: docs.anthropic.com, Messages and Streaming messages. Owns field names and their order.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

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

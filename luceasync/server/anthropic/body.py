"""The JSON body of a messages request: its types, as far as they are read.

Source: docs.anthropic.com, Messages. Owns the fields. Knows nothing of what they become.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from luceasync.server.pins import AskedPins


class CacheControl(msgspec.Struct):
    """A mark: what ends here is worth keeping."""

    type: str
    ttl: str | None = None


class Block(msgspec.Struct):
    """One part of a message's content, or of a tool's result; `type` says which fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Content = str | list[Block]


class Message(msgspec.Struct):
    """One turn; clients put system messages between others too."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Tool(msgspec.Struct):
    """A tool of the client's, or (by its `type`) one that only Anthropic's servers have."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct):
    """`schema` as it was sent."""

    type: str
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """The fields of `POST /v1/messages/count_tokens` that are read; null is the same as absent."""

    messages: list[Message]
    model: str
    system: Content | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesBody(CountBody, kw_only=True):
    """The fields of `POST /v1/messages` that are read."""

    max_tokens: int
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    kvflash_pin: AskedPins | None = None

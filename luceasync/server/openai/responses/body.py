"""The JSON body of a responses request: its types, as far as they are read.

Source: OpenAI's OpenAPI document, `CreateResponse`. Owns the fields. Knows nothing of what they
become.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from luceasync.server.pins import AskedPins


class Part(msgspec.Struct):
    """One part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct):
    """One item of a conversation; `type` says which fields it has. A message needs none."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class Tool(msgspec.Struct):
    """A function of the client's, or a tool of another kind, by its `type`."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct):
    """`schema` as it was sent."""

    type: str
    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The fields of `POST /v1/responses` that are read; null is the same as absent."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    priority: int | None = None
    prompt_cache_key: str | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = msgspec.Raw()
    background: bool | None = None
    stream: bool | None = None
    temperature: float | None = None
    text: TextOptions | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[Tool] | None = None
    top_p: float | None = None
    kvflash_pin: AskedPins | None = None


def effort_of(body: ResponsesBody) -> str | None:
    """How much the model is to think, in the client's word."""
    return None if body.reasoning is None else body.reasoning.effort

"""The shapes of a response, its items and its events.

Source: OpenAI's OpenAPI document, `Response` and `ResponseStreamEvent`. Owns field names.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from luceasync.server.work import LuceasyncBody, TimingsBody

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct):
    text: str = ""
    annotations: list[None] = msgspec.field(default_factory=list)
    type: Literal["output_text"] = "output_text"


class SummaryText(msgspec.Struct):
    """What the model thought, whole: nothing is summed up here."""

    text: str = ""
    type: Literal["summary_text"] = "summary_text"


class MessageItem(msgspec.Struct):
    id: str
    status: ItemStatus = "in_progress"
    content: list[OutputText] = msgspec.field(default_factory=list)
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class ReasoningItem(msgspec.Struct):
    id: str
    status: ItemStatus = "in_progress"
    summary: list[SummaryText] = msgspec.field(default_factory=list)
    type: Literal["reasoning"] = "reasoning"


class CallItem(msgspec.Struct):
    id: str
    call_id: str
    name: str
    status: ItemStatus = "in_progress"
    arguments: str = ""
    type: Literal["function_call"] = "function_call"


Item = MessageItem | ReasoningItem | CallItem


class InputDetails(msgspec.Struct):
    cached_tokens: int


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ErrorBody(msgspec.Struct):
    code: str
    message: str


class Incomplete(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class Response(msgspec.Struct, kw_only=True):
    """The plain answer, and what several events carry."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    output: list[Item] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    error: ErrorBody | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: Any
    tools: list[Any]
    top_p: float
    previous_response_id: None = None
    store: bool = False
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"
    timings: TimingsBody | UnsetType = UNSET
    luceasync: LuceasyncBody | UnsetType = UNSET


class Event(msgspec.Struct, omit_defaults=True):
    """One event; which fields it has follows from its type."""

    type: str
    sequence_number: int
    response: Response | None = None
    output_index: int | None = None
    item_id: str | None = None
    content_index: int | None = None
    summary_index: int | None = None
    item: Item | None = None
    part: OutputText | SummaryText | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    name: str | None = None
    logprobs: tuple[()] | None = None

"""OpenAI's shapes of a chat answer, streamed and plain.

Owns field names and their order. Knows nothing of where the values come from.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from luceasync.server.work import LuceasyncBody, TimingsBody


class LogprobEntry(msgspec.Struct):
    """One token; the entries of `top_logprobs` have no such list of their own."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LogprobEntry] | UnsetType = UNSET


class ChoiceLogprobs(msgspec.Struct):
    content: list[LogprobEntry]
    refusal: None = None


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """The name comes with the first delta of a call, and parts of the arguments with all."""

    arguments: str = msgspec.field(default_factory=str)
    name: str | None = None


class CallDelta(msgspec.Struct, omit_defaults=True):
    """A part of call `index`; its id and type come with the first one."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class DeltaMessage(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: DeltaMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class UsageBody(msgspec.Struct):
    """Tokens of the prompt, counted once, and of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    timings: TimingsBody | UnsetType = UNSET
    luceasync: LuceasyncBody | UnsetType = UNSET


class AnswerFunction(msgspec.Struct):
    """`arguments`: the JSON of an object, unless the answer was cut off."""

    name: str
    arguments: str


class AnswerCall(msgspec.Struct):
    id: str
    function: AnswerFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct):
    """`content` None: it consists of calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class AnswerChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct):
    """The plain answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[AnswerChoice]
    usage: UsageBody | UnsetType | None
    timings: TimingsBody | UnsetType
    luceasync: LuceasyncBody | UnsetType

"""OpenAI's shapes of a completion, streamed and plain.

Owns field names and their order. Knows nothing of where the values come from.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from luceasync.server.openai.chat_shapes import UsageBody
from luceasync.server.work import LuceasyncBody, TimingsBody


class Logprobs(msgspec.Struct):
    """Lists of the same length, an entry for each token."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)

    def add(self, other: Logprobs) -> None:
        """What follows."""
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None

    def add(self, other: CompletionChoice) -> None:
        """What follows."""
        self.text += other.text
        self.finish_reason = other.finish_reason or self.finish_reason
        if other.logprobs is not None:
            self.logprobs = self.logprobs or Logprobs()
            self.logprobs.add(other.logprobs)


class Completion(msgspec.Struct):
    """The plain answer, and one event of a streamed one."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: UsageBody | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET
    luceasync: LuceasyncBody | UnsetType = UNSET

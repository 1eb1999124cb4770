"""A flow, and what its speakers say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from tests.acceptance.turns.client import Client

Kind = Literal["memory", "restarts", "one restart", "little memory", "drafted", "drafted, restarts"]
MAX_SHORT_TOKENS = 64  # of a request
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read lines of a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


@dataclass(frozen=True, slots=True)
class Size:
    """How long texts are, in sentences of about ten tokens, and answers, in tokens."""

    num_turns: int = 3
    num_steps: int = 2
    system: int = 40
    message: int = 12
    answer: int = 24
    long: int = 560


@dataclass(frozen=True, slots=True)
class Flow:
    """How a conversation goes on, and what a client sends back of an answer.

    `max_short_tokens`: that a request may run again. `is_counted`: written bytes are counted too;
    `has_template`: it depends on what a template leaves out; `needs_directory`: it means nothing
    without one.
    """

    run: Callable[[Client, Size], Awaitable[None]]
    parallel: int = 1
    max_short_tokens: int = MAX_SHORT_TOKENS
    is_counted: bool = True
    has_template: bool = True
    needs_directory: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__


def said(topic: str, num_sentences: int) -> str:
    """A text for each topic that shares nothing with others."""
    return " ".join(f"The {i}. line about {topic} stands here." for i in range(num_sentences))


def user(topic: str, size: Size) -> dict[str, Any]:
    return {"role": "user", "content": said(topic, size.message)}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def beginning(topic: str, size: Size) -> list[dict[str, Any]]:
    return [{"role": "system", "content": said(topic, size.system)}]

"""Whether and how long a model thinks before it answers a chat, under the names of many servers.

Owns which field means what: those of OpenAI, vLLM, SGLang, Qwen, Z.ai, DeepSeek, OpenRouter and
Ollama.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from luceasync.server.fields import budget_or, effort_tokens, refuse, template_kwargs_of
from luceasync.server.openai.request_body import SamplingBody

THINKING_TYPES = {"enabled": True, "adaptive": True, "auto": None, "disabled": False}


class ThinkingSwitch(msgspec.Struct):
    """Z.ai's and DeepSeek's field, shaped as Anthropic's."""

    type: str | None = None
    budget_tokens: int | None = None


class ChatReasoning(msgspec.Struct):
    """OpenRouter's field."""

    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ReasoningBody(SamplingBody, kw_only=True):
    """The fields that say so."""

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    enable_thinking: bool | None = None
    think: bool | str | None = None
    thinking: ThinkingSwitch | bool | None = None
    reasoning: ChatReasoning | None = None
    include_reasoning: bool | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The chat template's variables, the most tokens of reasoning (None: any number), and whether
    it is sent to the client.
    """

    template_kwargs: dict[str, Any]
    most_tokens: int | None
    is_shown: bool


def reasoning_of(body: ReasoningBody) -> Reasoning:
    """What the fields ask for. Raises RequestError, which names the field at fault."""
    router = body.reasoning or ChatReasoning()
    where, effort = _effort(body, router)
    most = effort_tokens(where, effort)
    kwargs = template_kwargs_of(effort, None)
    thinks = _switch(body, router)
    if thinks is not None:
        kwargs["enable_thinking"] = thinks
        most = most if thinks else 0
    for param, tokens in (
        ("reasoning.max_tokens", router.max_tokens),
        ("thinking.budget_tokens", _switched(body).budget_tokens),
        ("thinking_budget", body.thinking_budget),
        ("thinking_token_budget", body.thinking_token_budget),
    ):
        most = budget_or(most, param, tokens)
    is_shown = body.include_reasoning is not False and not router.exclude
    return Reasoning({**kwargs, **(body.chat_template_kwargs or {})}, most, is_shown)


def _effort(body: ReasoningBody, router: ChatReasoning) -> tuple[str, str | None]:
    """The effort, and the field that has it."""
    if body.reasoning_effort is not None:
        return "reasoning_effort", body.reasoning_effort
    if router.effort is not None:
        return "reasoning.effort", router.effort
    return "think", body.think if isinstance(body.think, str) else None


def _switch(body: ReasoningBody, router: ChatReasoning) -> bool | None:
    """Whether the model thinks; None: as it usually does."""
    switched = _switched(body)
    if switched.type is not None and switched.type not in THINKING_TYPES:
        refuse("thinking.type", switched.type, f"one of {', '.join(THINKING_TYPES)}")
    asked = (
        body.enable_thinking,
        body.think if isinstance(body.think, bool) else None,
        THINKING_TYPES.get(switched.type or "auto"),
        router.enabled,
    )
    return next((one for one in asked if one is not None), None)


def _switched(body: ReasoningBody) -> ThinkingSwitch:
    match body.thinking:
        case None:
            return ThinkingSwitch()
        case bool(thinks):
            return ThinkingSwitch("enabled" if thinks else "disabled")
        case switch:
            return switch

"""What OpenAI's answers tell of their tokens.

Owns how the choices of one prompt are counted. Knows nothing of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

from luceasync.server.openai.chat_shapes import PromptTokensDetails, UsageBody
from luceasync.server.work import Finishes


def usage_of(finishes: Finishes) -> UsageBody:
    """The prompt counts once, as choice 0 found it; the tokens of all choices add up."""
    prompt, cached = finishes[0].usage.prompt_tokens, finishes[0].usage.cached_tokens
    completion = sum(finish.usage.completion_tokens for finish in finishes.values())
    return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def usage_of_all(prompts: Sequence[Finishes]) -> UsageBody:
    """Several prompts with choices of their own, added up."""
    each = [usage_of(finishes) for finishes in prompts]
    prompt = sum(usage.prompt_tokens for usage in each)
    completion = sum(usage.completion_tokens for usage in each)
    cached = sum(finishes[0].usage.cached_tokens for finishes in prompts)
    return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached))

"""OpenAI's error object.

Owns its fields and the type that follows from a status. Knows nothing of exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from luceasync.errors import RequestError
from luceasync.request import ModelCard
from luceasync.server.answer_stats import Finishes
from luceasync.server.failures import Failure

MAX_NAME_CHARS = 100  # of a wrong model name that are told again
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """A whole error response, and the data of an error event."""

    error: ErrorObject


def error_body(failure: Failure) -> ErrorBody:
    """`failure` in OpenAI's shape."""
    kind = "server_error" if failure.status >= 500 else "invalid_request_error"
    kind = TYPES.get(failure.status, kind)
    return ErrorBody(ErrorObject(failure.message, kind, failure.param, failure.code))


def unknown_model(name: str, card: ModelCard) -> RequestError:
    """The 404 for a model that is not served, worded as OpenAI words it; then what is served."""
    served = " or ".join(f"`{each}`" for each in card.names)
    shown = name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}..."
    return RequestError(
        f"The model `{shown}` does not exist or you do not have access to it. "
        f"This server serves {served}.",
        param="model",
        code="model_not_found",
        status=404,
    )


# Fields of other servers that would change what an answer says or may be. Owns the list, and
# the refusal: an answer without the constraint that was asked for is worse than none. Fields
# that only tune how fast it comes are ignored, as all others that nobody knows.


# What a client sends that names a field without using it.
OFF = frozenset(
    {b"", b"null", b"false", b"0", b'""', b"[]", b"{}", b'"none"', b'"auto"', b'["text"]'}
)


class UnservedBody(msgspec.Struct):
    """The fields as they were sent, not parsed: empty for one that is absent."""

    # Tools as they were given before there was `tools`.
    functions: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    # Which tokens an answer has, and where it ends.
    bad_words: msgspec.Raw = msgspec.Raw()
    allowed_token_ids: msgspec.Raw = msgspec.Raw()
    stop_token_ids: msgspec.Raw = msgspec.Raw()
    use_beam_search: msgspec.Raw = msgspec.Raw()
    # What the prompt is, and what else is told of it.
    chat_template: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    continue_final_message: msgspec.Raw = msgspec.Raw()
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()
    modalities: msgspec.Raw = msgspec.Raw()
    web_search_options: msgspec.Raw = msgspec.Raw()


def refuse_unserved(body: UnservedBody) -> None:
    """Raise RequestError, which names the field, for one that is used. Its value is not told
    again: it may be long.
    """
    for name in UnservedBody.__struct_fields__:
        if bytes(getattr(body, name)) not in OFF:
            raise RequestError(f"'{name}' is not served here: leave it out.", param=name)


# What OpenAI's answers tell of their tokens. Owns how the choices of one prompt are counted.
# Knows nothing of chunks.


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class UsageBody(msgspec.Struct):
    """Tokens of the prompt, counted once, and of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


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

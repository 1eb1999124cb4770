"""The parts that the answers of OpenAI's endpoints share: the error object and the usage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from luceasync import __version__
from luceasync.errors import RequestError
from luceasync.request import Delta, ModelCard, ReasoningPiece, TokenLogprob
from luceasync.server.answer_stats import Finishes
from luceasync.server.failures import Failure

SYSTEM_FINGERPRINT = f"luceasync-{__version__}"
DONE_DATA = "[DONE]"
DONE = f"data: {DONE_DATA}\n\n".encode()
MAX_NAME_CHARS = 100  # of an unknown model's name in an error message
MIN_LOGPROB = -9999.0  # OpenAI's substitute for minus infinity, which JSON lacks
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class OpenAiErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAiError(msgspec.Struct):
    """A whole error response, and the data of an error event."""

    error: OpenAiErrorObject


def error_body(failure: Failure) -> OpenAiError:
    """`failure` in OpenAI's form."""
    default = "server_error" if failure.status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(failure.status, default)
    return OpenAiError(OpenAiErrorObject(failure.message, kind, failure.param, failure.code))


def check_model(name: str | None, card: ModelCard) -> None:
    """Raise RequestError, a 404 worded like OpenAI's, for a model that is not served."""
    if name is None or card.serves(name):
        return
    served = " or ".join(f"`{each}`" for each in card.names)
    shown = name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}..."
    raise RequestError(
        f"The model `{shown}` does not exist or you do not have access to it. "
        f"This server serves {served}.",
        param="model",
        code="model_not_found",
        status=404,
    )


def json_logprob(token: TokenLogprob) -> float:
    """The log-probability as a number that JSON can express."""
    return max(token.logprob, MIN_LOGPROB)


class LogprobEntry(msgspec.Struct):
    """One token; the entries of `top_logprobs` have no `top_logprobs` themselves."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LogprobEntry] | UnsetType = UNSET


def entries_of(logprobs: Iterable[TokenLogprob]) -> list[LogprobEntry]:
    """The tokens in the form of OpenAI's APIs."""
    return [_entry(one, [_entry(top) for top in one.top]) for one in logprobs]


def _entry(one: TokenLogprob, top: list[LogprobEntry] | UnsetType = UNSET) -> LogprobEntry:
    return LogprobEntry(one.token, json_logprob(one), list(one.token_bytes), top)


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    """Tokens of the prompt, counted once, and of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class ReasoningTokens:
    """Counts the reasoning tokens of one answer."""

    def __init__(self) -> None:
        self.count = 0
        self._is_open = False

    def take(self, delta: Delta) -> None:
        """Count the tokens of the next delta. One without pieces continues the previous kind."""
        if delta.pieces:
            is_all = all(isinstance(piece, ReasoningPiece) for piece in delta.pieces)
            self._is_open = isinstance(delta.pieces[-1], ReasoningPiece)
        else:
            is_all = self._is_open
        self.count += len(delta.token_ids) if is_all else 0


def usage_of(finishes: Finishes) -> UsageBody:
    """The prompt counts once, as restored by choice 0; the tokens of all choices are summed."""
    prompt, cached = finishes[0].usage.prompt_tokens, finishes[0].usage.cached_tokens
    completion = sum(finish.usage.completion_tokens for finish in finishes.values())
    return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def usage_of_all(prompts: Sequence[Finishes]) -> UsageBody:
    """The sum over several prompts, each with its own choices."""
    each = [usage_of(finishes) for finishes in prompts]
    prompt = sum(usage.prompt_tokens for usage in each)
    completion = sum(usage.completion_tokens for usage in each)
    cached = sum(finishes[0].usage.cached_tokens for finishes in prompts)
    return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached))

"""POST /v1/completions: continues text.

Source: OpenAI's OpenAPI document, `CreateCompletion`. Owns its types and ranges, and the mapping
from a call's choices to its prompts.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers

from luceasync.request import (
    Delta,
    Engine,
    Finish,
    InfillPrompt,
    Request,
    Stream,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
)
from luceasync.server.answer_stats import LuceasyncBody, TimingsBody, luceasync_of, timings_of
from luceasync.server.failures import Failure
from luceasync.server.family import BodySpec
from luceasync.server.fields import at_most, decode, in_range, refuse
from luceasync.server.http.auth import Caller
from luceasync.server.http.responses import encode_event
from luceasync.server.openai.common import (
    DONE,
    DONE_DATA,
    SYSTEM_FINGERPRINT,
    OpenAiError,
    UsageBody,
    check_model,
    error_body,
    json_logprob,
    usage_of_all,
)
from luceasync.server.openai.request_body import (
    SamplingBody,
    StreamOptions,
    max_tokens_of,
    num_choices_of,
    request_of,
)
from luceasync.server.unserved import refuse_unserved

MAX_PROMPTS = 64
MAX_LOGPROBS = 5  # as in OpenAI's API; an echoed prompt may have many tokens
DEFAULT_MAX_TOKENS = 16
EXAMPLE = {"prompt": "Once upon a time", "max_tokens": 50}

Prompt = str | list[int]


class CompletionBody(SamplingBody, kw_only=True):
    """The fields of `POST /v1/completions` that are read; null is the same as absent."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists with an entry for each token."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)

    def add(self, other: CompletionLogprobs) -> None:
        """Append `other`."""
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None

    def add(self, other: CompletionChoice) -> None:
        """Append `other`."""
        self.text += other.text
        self.finish_reason = other.finish_reason or self.finish_reason
        if other.logprobs is not None:
            self.logprobs = self.logprobs or CompletionLogprobs()
            self.logprobs.add(other.logprobs)


class Completion(msgspec.Struct):
    """The plain answer, and each event of a streamed one."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: UsageBody | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET
    luceasync: LuceasyncBody | UnsetType = UNSET

    @property
    def text(self) -> str:
        """The text of the first choice, or the text that an event adds to it."""
        return "".join([each.text for each in self.choices if each.index == 0])


_decoder = msgspec.json.Decoder(CompletionBody)


class Completions:
    """Continue text."""

    path = "/v1/completions"
    body = BodySpec(CompletionBody, Completion, OpenAiError, Completion, EXAMPLE, DONE_DATA)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> CompletionCall:
        card = self._engine.card
        completion = decode(_decoder, body)
        check_model(completion.model, card)
        _refuse_unserved(completion)
        prompts = _prompts(completion)
        num_all = len(prompts) * num_choices_of(completion)
        if num_all > MAX_PROMPTS:  # the queue could never hold them
            refuse("n", completion.n, f"at most {MAX_PROMPTS} choices of all prompts")
        echoed = [self._text(prompt) if completion.echo else "" for prompt in prompts]
        requests = [_request(completion, prompt, caller, headers) for prompt in prompts]
        return CompletionCall(completion, requests, echoed, card.name)

    def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._engine.token_bytes(prompt, "prompt").decode(errors="replace")


class CompletionCall:
    """A parsed request. The plain answer always includes the usage."""

    def __init__(
        self, body: CompletionBody, requests: Sequence[Request], echoed: Sequence[str], model: str
    ) -> None:
        self.requests = requests
        self.stream = bool(body.stream)
        options = body.stream_options or StreamOptions()
        self._includes_usage = not self.stream or bool(options.include_usage)
        self._includes_logprobs = body.logprobs is not None
        self._shows_stop = bool(body.include_stop_str_in_output)
        self._echoed = echoed
        self._model = model
        self._id = f"cmpl-{random.getrandbits(128):032x}"
        self._created = int(time.time())
        self._num_echoed: dict[int, int] = {}  # characters of the echoed prompt that have been sent

    async def events(self, streams: Sequence[Stream]) -> AsyncGenerator[Completion, None]:
        """A chunk for each delta; the last one has the statistics."""
        num_choices = self.requests[0].num_choices
        finishes: list[dict[int, Finish]] = [{} for _ in streams]
        begun: set[int] = set()
        num_chars: dict[int, int] = {}
        async for number, delta in merge_streams(streams):
            index = number * num_choices + delta.index
            lead = "" if index in begun else self._echoed[number]
            begun.add(index)
            ending = delta.finish.stop if self._shows_stop and delta.finish else None
            text, offset = lead + delta.text + (ending or ""), num_chars.get(index, len(lead))
            num_chars[index] = offset + len(delta.text)
            if delta.finish is not None:
                finishes[number][delta.index] = delta.finish
            if text or delta.logprobs or delta.prompt_logprobs or delta.finish is not None:
                yield self._chunk([self._choice(index, text, offset, delta)])
        last = self._chunk([])
        last.usage = usage_of_all(finishes) if self._includes_usage else UNSET
        of_all = dict(enumerate(f for each in finishes for f in each.values()))
        last.timings, last.luceasync = timings_of(of_all), luceasync_of(of_all)
        yield last

    def encode(self, event: Completion) -> bytes:
        return encode_event(event)

    def end(self, failure: Failure | None) -> bytes:
        """[DONE], or an error event without it."""
        return DONE if failure is None else encode_event(error_body(failure))

    async def fold(self, events: AsyncIterator[Completion]) -> Completion:
        choices: dict[int, CompletionChoice] = {}
        answer = self._chunk([])
        async for answer in events:
            for choice in answer.choices:
                so_far = choices.setdefault(choice.index, CompletionChoice(choice.index, ""))
                so_far.add(choice)
        answer.choices = [choices[index] for index in sorted(choices)]
        return answer

    def _choice(self, index: int, text: str, offset: int, delta: Delta) -> CompletionChoice:
        reason = None if delta.finish is None else delta.finish.reason
        logprobs = None
        if self._includes_logprobs:
            logprobs = _logprobs(delta.prompt_logprobs, self._num_echoed.get(index, 0))
            self._num_echoed[index] = self._num_echoed.get(index, 0) + sum(
                len(one.token) for one in delta.prompt_logprobs
            )
            logprobs.add(_logprobs(delta.logprobs, offset))
        return CompletionChoice(index, text, logprobs, reason)

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(self._id, self._created, self._model, SYSTEM_FINGERPRINT, choices)


def _refuse_unserved(body: CompletionBody) -> None:
    refuse_unserved(body)
    if body.suffix and body.echo:
        refuse("echo", body.echo, "false with a 'suffix'")
    if body.best_of is not None and body.best_of != (body.n or 1):
        refuse("best_of", body.best_of, "the same as 'n'")


def _prompts(body: CompletionBody) -> list[Prompt]:
    """The prompts of the field: a text, texts, token ids, or lists of token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    ids = [each for each in prompt if isinstance(each, int)]
    if ids and len(ids) == len(prompt):
        return [ids]
    prompts = [each for each in prompt if not isinstance(each, int)]
    if not prompt or ids or len({type(each) for each in prompts}) > 1:
        refuse("prompt", prompt, "text, token ids, or a list of either, all of one kind")
    at_most("prompt", prompts, MAX_PROMPTS, "prompts")
    return prompts


def _prompt(prompt: Prompt, suffix: str | None) -> InfillPrompt | TextPrompt | TokenPrompt:
    if isinstance(prompt, str):
        return InfillPrompt(prompt, suffix) if suffix else TextPrompt(prompt)
    if suffix:
        refuse("prompt", prompt, "text with a 'suffix'")
    return TokenPrompt(tuple(prompt))


def _request(body: CompletionBody, prompt: Prompt, caller: Caller, headers: Headers) -> Request:
    has_limit = body.max_tokens is not None or body.n_predict is not None
    most = max_tokens_of(body, least=0 if body.echo else 1) if has_limit else DEFAULT_MAX_TOKENS
    top = None if body.logprobs is None else in_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    return replace(
        request_of(body, _prompt(prompt, body.suffix), most, caller, headers),
        top_logprobs=top,
        prompt_top_logprobs=top if body.echo else None,
    )


def _logprobs(tokens: Iterable[TokenLogprob], offset: int) -> CompletionLogprobs:
    """Log-probabilities of tokens, which begin at character `offset` of the choice's text. The
    first token of a prompt has none.
    """
    logprobs = CompletionLogprobs()
    for one in tokens:
        is_first = math.isnan(one.logprob)
        logprobs.tokens.append(one.token)
        logprobs.token_logprobs.append(None if is_first else json_logprob(one))
        logprobs.top_logprobs.append(None if is_first else _top(one))
        logprobs.text_offset.append(offset)
        offset += len(one.token)
    return logprobs


def _top(one: TokenLogprob) -> dict[str, float]:
    """The most probable tokens, and the token itself if it is not among them."""
    return {top.token: json_logprob(top) for top in (one, *reversed(one.top))}


async def merge_streams(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield (index of a stream, its next delta) as deltas arrive, until all streams have ended.
    Raises what a stream raises.
    """
    waiting = {_next(stream): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                delta = task.result()
                if delta is not None:
                    waiting[_next(streams[number])] = number
                    yield number, delta
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _next(stream: Stream) -> asyncio.Task[Delta | None]:
    return asyncio.ensure_future(_next_or_none(stream))


async def _next_or_none(stream: Stream) -> Delta | None:
    return await anext(aiter(stream), None)

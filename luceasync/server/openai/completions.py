"""POST /v1/completions, as a body and an answer: text goes on where prompts end.

Source: OpenAI's OpenAPI document, `CreateCompletion`. Owns its types, its ranges, and which of a
call's choices belongs to which prompt. Knows nothing of who drives it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers

from luceasync.request import (
    Delta,
    Engine,
    Finish,
    Request,
    Stream,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
)
from luceasync.server.answer_stats import LuceasyncBody, TimingsBody, luceasync_of, timings_of
from luceasync.server.failures import Failure
from luceasync.server.family import Form
from luceasync.server.fields import (
    AskedPins,
    at_most,
    conversation_of,
    decode,
    in_range,
    pins_of,
    refuse,
)
from luceasync.server.http.auth import Caller
from luceasync.server.http.responses import encode_event, merged
from luceasync.server.openai.chat_answer import LEAST_LOGPROB, SYSTEM_FINGERPRINT
from luceasync.server.openai.chat_body import StreamOptions
from luceasync.server.openai.common import (
    UsageBody,
    error_body,
    refuse_unserved,
    unknown_model,
    usage_of_all,
)
from luceasync.server.openai.sampling import (
    SamplingBody,
    constraint_of,
    min_tokens_of,
    num_choices_of,
    priority_of,
    sampling_of,
    stops_of,
)

# OpenAI's shapes of a completion, streamed and plain. Owns field names and their order. Knows
# nothing of where the values come from.


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


DONE = b"data: [DONE]\n\n"
MAX_PROMPTS = 64
MAX_LOGPROBS = 20
MAX_ECHOED_LOGPROBS = 5  # a prompt may have many tokens
DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


class CompletionBody(SamplingBody, kw_only=True):
    """The fields that are read; null is the same as absent."""

    prompt: str | list[int | str | list[int]]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    kvflash_pin: AskedPins | None = None
    priority: int | None = None


_decoder = msgspec.json.Decoder(CompletionBody)


class Completions:
    """See luceasync.server.family.Endpoint."""

    path = "/v1/completions"
    form = Form(CompletionBody, streams=True)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> CompletionCall:
        card = self._engine.card
        asked = decode(_decoder, body)
        if asked.model is not None and not card.serves(asked.model):
            raise unknown_model(asked.model, card)
        _refuse_unserved(asked)
        prompts = _prompts(asked)
        num_all = len(prompts) * num_choices_of(asked)
        if num_all > MAX_PROMPTS:  # no queue would ever take them
            refuse("n", asked.n, f"at most {MAX_PROMPTS} choices of all prompts")
        echoed = [self._text(prompt) if asked.echo else "" for prompt in prompts]
        conversation = conversation_of(headers, asked.prompt_cache_key)
        requests = [_request(asked, prompt, caller, conversation) for prompt in prompts]
        return CompletionCall(asked, requests, echoed, card.name)

    def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._engine.spelled(prompt, "prompt").decode(errors="replace")


class CompletionCall:
    """See luceasync.server.family.Call. The plain answer always tells the usage."""

    def __init__(
        self, body: CompletionBody, requests: Sequence[Request], echoed: Sequence[str], model: str
    ) -> None:
        self.requests = requests
        self.stream = bool(body.stream)
        options = body.stream_options or StreamOptions()
        self._tells_usage = not self.stream or bool(options.include_usage)
        self._tells_logprobs = body.logprobs is not None
        self._echoed = echoed
        self._model = model
        self._id = f"cmpl-{random.getrandbits(128):032x}"
        self._created = int(time.time())
        self._num_echoed: dict[int, int] = {}  # characters whose log-probabilities were told

    async def events(self, streams: Sequence[Stream]) -> AsyncGenerator[Completion, None]:
        """A chunk for each delta; the last one tells of the work."""
        num_choices = self.requests[0].num_choices
        finishes: list[dict[int, Finish]] = [{} for _ in streams]
        is_begun: set[int] = set()
        num_chars: dict[int, int] = {}
        async for number, delta in merged(streams):
            index = number * num_choices + delta.index
            lead = "" if index in is_begun else self._echoed[number]
            is_begun.add(index)
            text, offset = lead + delta.text, num_chars.get(index, len(lead))
            num_chars[index] = offset + len(delta.text)
            if delta.finish is not None:
                finishes[number][delta.index] = delta.finish
            if text or delta.logprobs or delta.prompt_logprobs or delta.finish is not None:
                yield self._chunk([self._choice(index, text, offset, delta)])
        last = self._chunk([])
        last.usage = usage_of_all(finishes) if self._tells_usage else UNSET
        of_all = dict(enumerate(f for each in finishes for f in each.values()))
        last.timings, last.luceasync = timings_of(of_all), luceasync_of(of_all)
        yield last

    def encode(self, event: Completion) -> bytes:
        return encode_event(event)

    def end(self, failure: Failure | None) -> bytes:
        """A stream that broke off has no [DONE]."""
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
        if self._tells_logprobs:
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
    if body.suffix:
        refuse("suffix", body.suffix, "none (no text is put before another here)")
    if body.best_of is not None and body.best_of != (body.n or 1):
        refuse("best_of", body.best_of, "the same as 'n'")
    if body.echo and (body.logprobs or 0) > MAX_ECHOED_LOGPROBS:
        refuse("logprobs", body.logprobs, f"at most {MAX_ECHOED_LOGPROBS} beside 'echo'")


def _prompts(body: CompletionBody) -> list[Prompt]:
    """A text, texts, ids, or lists of ids."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    ids = [each for each in given if isinstance(each, int)]
    if ids and len(ids) == len(given):
        return [ids]
    prompts = [each for each in given if not isinstance(each, int)]
    if not given or ids or len({type(prompt) for prompt in prompts}) > 1:
        refuse("prompt", given, "text, token ids, or a list of such, all of one kind")
    at_most("prompt", prompts, MAX_PROMPTS, "prompts")
    return prompts


def _request(body: CompletionBody, prompt: Prompt, caller: Caller, conversation: str) -> Request:
    most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    top = None if body.logprobs is None else in_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    return Request(
        TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(tuple(prompt)),
        sampling=sampling_of(body),
        max_tokens=in_range("max_tokens", most, 0 if body.echo else 1, 2**31 - 1),
        min_tokens=min_tokens_of(body, most),
        stop=stops_of(body),
        ignore_eos=bool(body.ignore_eos),
        num_choices=num_choices_of(body),
        pins=pins_of(body.kvflash_pin),
        top_logprobs=top,
        prompt_top_logprobs=top if body.echo else None,
        constraint=constraint_of(body),
        priority=priority_of(body.priority),
        tenant=caller.tenant(body.cache_salt),
        client=caller.client,
        conversation=conversation,
    )


def _logprobs(told: Iterable[TokenLogprob], offset: int) -> Logprobs:
    """Those of tokens whose text begins at character `offset` of the choice's. The first token of a
    prompt has none.
    """
    logprobs = Logprobs()
    for one in told:
        is_first = math.isnan(one.logprob)
        logprobs.tokens.append(one.token)
        logprobs.token_logprobs.append(None if is_first else _finite(one))
        logprobs.top_logprobs.append(None if is_first else _top(one))
        logprobs.text_offset.append(offset)
        offset += len(one.token)
    return logprobs


def _top(one: TokenLogprob) -> dict[str, float]:
    """The most probable tokens, and the token itself: one more where it is none of them."""
    return {top.token: _finite(top) for top in (one, *reversed(one.top))}


def _finite(one: TokenLogprob) -> float:
    return max(one.logprob, LEAST_LOGPROB)

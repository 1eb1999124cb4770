"""POST /infill and /completion: llama.cpp's own API for text, which editors use.

Source: the README of llama.cpp's server. Owns its types and defaults. The other fields are those of
text completions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers

from luceasync.request import (
    Engine,
    Finish,
    InfillPrompt,
    ModelCard,
    Prompt,
    Request,
    Stream,
    TextPrompt,
    TokenPrompt,
)
from luceasync.server.answer_stats import LuceasyncBody, TimingsBody, luceasync_of, timings_of
from luceasync.server.failures import Failure
from luceasync.server.family import BodySpec
from luceasync.server.fields import MAX_INT, at_most, decode, in_range, in_range_or, refuse
from luceasync.server.http.auth import Caller
from luceasync.server.http.responses import encode_event
from luceasync.server.openai.common import OpenAiError, check_model, error_body
from luceasync.server.openai.request_body import (
    MAX_CHOICES,
    SamplingBody,
    max_tokens_of,
    request_of,
)
from luceasync.server.unserved import refuse_unserved

MAX_FILES = 1024
MAX_RESPONSE_FIELDS = 64
UNNAMED = "tmp"  # llama.cpp's name for a file without one
# llama.cpp's defaults of /completion.
DEFAULT_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
# Alternatives are drawn from tokens with at least this fraction of the most probable one's
# probability, about what llama.cpp's sampler `infill` leaves.
ALTERNATIVES_MIN_P = 0.2


class NativeBody(SamplingBody, kw_only=True):
    """The fields that both routes have. Fields that only affect speed are not read, nor are time
    limits: a client that gives up closes its connection.
    """

    n_cmpl: int | None = None
    n_indent: int | None = None
    response_fields: list[str] | None = None
    n_probs: msgspec.Raw = msgspec.Raw()
    lora: msgspec.Raw = msgspec.Raw()


class ExtraFile(msgspec.Struct):
    text: str
    filename: str | None = None


class InfillBody(NativeBody, kw_only=True):
    """`prompt` is the beginning of the text between prefix and suffix."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None


class NativeCompletionBody(NativeBody, kw_only=True):
    prompt: str | list[int]


class NativeTimings(TimingsBody, kw_only=True):
    """`cache_n` is the number of prompt tokens that were restored."""

    cache_n: int
    prompt_per_token_ms: float
    predicted_per_token_ms: float


class NativeSettings(msgspec.Struct):
    """The settings of an answer. `n_predict` -1: until the context is full."""

    n_ctx: int
    n_predict: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


class NativeAnswer(msgspec.Struct):
    """The plain answer, and the last event of each completion in a streamed one; earlier events
    have the fields up to `tokens_evaluated`. `tokens_cached`: prompt tokens that were restored
    instead of computed. `truncated`: the context was too small even for the first of the other
    files.
    """

    index: int
    content: str
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    tokens: tuple[int, ...] = ()
    id_slot: int = -1
    model: str | UnsetType = UNSET
    generation_settings: NativeSettings | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["eos", "limit", "word"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: NativeTimings | UnsetType = UNSET
    luceasync: LuceasyncBody | UnsetType = UNSET


_infill = msgspec.json.Decoder(InfillBody)
_completion = msgspec.json.Decoder(NativeCompletionBody)


class Infill:
    """Generate the text between a prefix and a suffix."""

    path = "/infill"
    body = BodySpec(
        InfillBody,
        NativeAnswer,
        OpenAiError,
        NativeAnswer,
        {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n", "n_predict": 32},
        is_selected=True,
    )

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> NativeCall:
        infill = decode(_infill, body)
        files = infill.input_extra or []
        at_most("input_extra", files, MAX_FILES, "files")
        prompt = InfillPrompt(
            infill.input_prefix,
            infill.input_suffix,
            infill.prompt or "",
            tuple((file.filename or UNNAMED, file.text) for file in files),
            param="input_prefix",
            after_param="input_suffix",
        )
        if infill.temperature is None:
            infill.temperature = 0.0 if _num_choices(infill) == 1 else 1.0
            infill.min_p = ALTERNATIVES_MIN_P if infill.min_p is None else infill.min_p
        return _call(infill, prompt, caller, headers, self._engine.card)


class NativeCompletion:
    """Continue text."""

    path = "/completion"
    body = BodySpec(
        NativeCompletionBody,
        NativeAnswer,
        OpenAiError,
        NativeAnswer,
        {"prompt": "Once upon a time", "n_predict": 50},
        is_selected=True,
    )

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> NativeCall:
        completion = decode(_completion, body)
        for name, default in DEFAULT_SAMPLING.items():
            if getattr(completion, name) is None:
                setattr(completion, name, default)
        written = completion.prompt
        prompt = TextPrompt(written) if isinstance(written, str) else TokenPrompt(tuple(written))
        return _call(completion, prompt, caller, headers, self._engine.card)


def _call(
    body: NativeBody, prompt: Prompt, caller: Caller, headers: Headers, card: ModelCard
) -> NativeCall:
    check_model(body.model, card)
    refuse_unserved(body, "n_probs", "lora")
    fields = body.response_fields or []
    at_most("response_fields", fields, MAX_RESPONSE_FIELDS, "fields")
    body.n = _num_choices(body)
    most = max_tokens_of(body, least=0)
    request = request_of(body, prompt, most, caller, headers)
    request = replace(
        request,
        least_indent=in_range_or(0, "n_indent", body.n_indent, 0, MAX_INT),
        keep_prefix=most == 0,
    )
    return NativeCall(request, bool(body.stream), fields, card)


def _num_choices(body: NativeBody) -> int:
    """The number of completions, from llama.cpp's field or OpenAI's."""
    if body.n_cmpl is None:
        return in_range_or(1, "n", body.n, 1, MAX_CHOICES)
    if body.n is not None and body.n != body.n_cmpl:
        refuse("n", body.n, "the same as 'n_cmpl'")
    return in_range("n_cmpl", body.n_cmpl, 1, MAX_CHOICES)


class NativeCall:
    """A parsed request. Several completions are answered with a list."""

    def __init__(
        self, request: Request, stream: bool, response_fields: Sequence[str], card: ModelCard
    ) -> None:
        self.requests = (request,)
        self.stream = stream
        self._request = request
        self._response_fields = response_fields
        self._card = card

    async def events(self, streams: Sequence[Stream]) -> AsyncGenerator[NativeAnswer, None]:
        """An event for each delta; the last one of each completion has the statistics."""
        [stream] = streams
        num_tokens: dict[int, int] = {}
        with_lines: set[int] = set()
        async for delta in stream:
            index = delta.index
            num_tokens[index] = num_tokens.get(index, 0) + len(delta.token_ids)
            if "\n" in delta.text:
                with_lines.add(index)
            if delta.text or delta.finish is not None:
                event = NativeAnswer(
                    index, delta.text, False, num_tokens[index], stream.num_prompt_tokens
                )
                if delta.finish is not None:
                    self._end(event, delta.finish, index in with_lines)
                yield event

    def encode(self, event: NativeAnswer) -> bytes:
        return encode_event(self._chosen(event) if event.stop else event)

    def end(self, failure: Failure | None) -> bytes:
        """An error event; nothing after a complete answer, which ends with its last event."""
        return b"" if failure is None else encode_event(error_body(failure))

    async def fold(self, events: AsyncIterator[NativeAnswer]) -> object:
        parts: dict[int, list[str]] = {}
        answers: dict[int, NativeAnswer] = {}
        async for event in events:
            parts.setdefault(event.index, []).append(event.content)
            answers[event.index] = event
        for index, answer in answers.items():
            answer.content = "".join(parts[index])
        chosen = [self._chosen(answers[index]) for index in sorted(answers)]
        return chosen[0] if len(chosen) == 1 else chosen

    def _end(self, event: NativeAnswer, finish: Finish, has_new_line: bool) -> None:
        """Add the fields that are known at the end of a completion."""
        sampling, most = self._request.sampling, self._request.max_tokens
        cached = finish.usage.cached_tokens
        event.stop = True
        event.model = self._card.name
        event.generation_settings = NativeSettings(
            self._card.max_ctx_tokens,
            -1 if most is None else most,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
        )
        event.has_new_line = has_new_line
        event.truncated = finish.num_left_out > 0
        event.stop_type = self._stop_type(finish)
        event.stopping_word = (finish.stop or "") if event.stop_type == "word" else ""
        event.tokens_cached = cached
        event.timings = _timings(timings_of({0: finish}), cached)
        event.luceasync = luceasync_of({0: finish})

    def _stop_type(self, finish: Finish) -> Literal["eos", "limit", "word"]:
        """The reason for the end; a stop by indentation is a "limit", as in llama.cpp."""
        if finish.stop is not None and finish.stop in self._request.stop:
            return "word"
        return "limit" if finish.reason == "length" or finish.stop is not None else "eos"

    def _chosen(self, answer: NativeAnswer) -> object:
        """The answer, or the parts of it at the paths in `response_fields`, as in llama.cpp."""
        if not self._response_fields:
            return answer
        whole = msgspec.to_builtins(answer)
        found = ((path, _at(whole, path)) for path in self._response_fields)
        return {path: value for path, value in found if value is not UNSET}


def _at(whole: Mapping[str, Any], path: str) -> Any:
    """The value at a path such as "timings/prompt_n"; UNSET if there is none."""
    value: Any = whole
    for key in path.split("/"):
        if not isinstance(value, dict) or key not in value:
            return UNSET
        value = value[key]
    return value


def _timings(timings: TimingsBody, cached: int) -> NativeTimings:
    return NativeTimings(
        **msgspec.structs.asdict(timings),
        cache_n=cached,
        prompt_per_token_ms=_each(timings.prompt_ms, timings.prompt_n),
        predicted_per_token_ms=_each(timings.predicted_ms, timings.predicted_n),
    )


def _each(total_ms: float, number: int) -> float:
    return round(total_ms / number, 3) if number else 0.0

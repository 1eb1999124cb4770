"""The lines of an answer in Ollama's API, and the plain answer as a fold of them.

Source: docs.ollama.com/api. Owns which line has which fields. Durations are nanoseconds that the
engine measured.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from luceasync.request import (
    ArgumentsPiece,
    CallPiece,
    Delta,
    Finish,
    ReasoningPiece,
    Request,
    Stream,
    TextPiece,
    TokenLogprob,
)
from luceasync.server.answer_stats import LuceasyncBody, TimingsBody, luceasync_of, timings_of
from luceasync.server.failures import Failure
from luceasync.server.fields import with_whole_characters
from luceasync.server.http.responses import encode_line

NS = 1_000_000_000
MIN_LOGPROB = -9999.0  # JSON's substitute for minus infinity


class OllamaError(msgspec.Struct):
    """A whole error response, and the last line of an answer that failed."""

    error: str


def error_body(failure: Failure) -> OllamaError:
    """`failure` in Ollama's form, which names the field only in the message."""
    return OllamaError(failure.message)


class FunctionCall(msgspec.Struct):
    """`arguments` is an object."""

    index: int
    name: str
    arguments: msgspec.Raw


class OllamaCall(msgspec.Struct):
    id: str
    function: FunctionCall


class AnsweredMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaLogprob(msgspec.Struct):
    """One token; the entries of `top_logprobs` have no `top_logprobs` themselves."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[OllamaLogprob] | UnsetType = UNSET


class AnswerLine(msgspec.Struct, kw_only=True):
    """The fields that chat and generate share; durations and counts are in the last line only.

    `load_duration` is the wait for a lane; `prompt_eval_duration` is the time until the first
    token, `eval_duration` the time from it on. `prompt_eval_count` is the whole prompt, including
    restored tokens.
    """

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[OllamaLogprob] | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET
    luceasync: LuceasyncBody | UnsetType = UNSET


class ChatLine(AnswerLine, kw_only=True):
    """A line of a streamed chat, and the plain answer."""

    message: AnsweredMessage

    @classmethod
    def of(cls, model: str, message: AnsweredMessage) -> ChatLine:
        return cls(model=model, created_at=now(), message=message)

    def said(self) -> AnsweredMessage:
        """The message that the line adds to the answer."""
        return self.message


class GenerateLine(AnswerLine, kw_only=True):
    """A line of a streamed text, and the plain answer."""

    response: str
    thinking: str | UnsetType = UNSET

    @classmethod
    def of(cls, model: str, message: AnsweredMessage) -> GenerateLine:
        return cls(
            model=model, created_at=now(), response=message.content, thinking=message.thinking
        )

    def said(self) -> AnsweredMessage:
        """The message that the line adds to the answer."""
        return AnsweredMessage(content=self.response, thinking=self.thinking)


Line = ChatLine | GenerateLine


def now() -> str:
    """The current time in Ollama's format."""
    return timestamp(time.time())


def timestamp(unix_s: float) -> str:
    """A Unix time in Ollama's format."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


class LinesCall:
    """A parsed request whose answer consists of lines of type `line`."""

    def __init__(self, request: Request, model: str, line: type[Line], *, stream: bool) -> None:
        self.requests: Sequence[Request] = (request,)
        self.stream = stream
        self._model = model
        self._line = line
        self._begun_ns = time.perf_counter_ns()

    async def events(self, streams: Sequence[Stream]) -> AsyncGenerator[Line, None]:
        """A line for each piece of text; a call is one line, sent once it is complete."""
        [stream] = streams
        calls = CallParts()
        async for delta in stream:
            logprobs: list[OllamaLogprob] | UnsetType = _logprobs(delta)
            for message in calls.messages(delta):
                line = self._line.of(self._model, message)
                line.logprobs, logprobs = logprobs, UNSET  # the first has those of all tokens
                yield line
            if logprobs is not UNSET:
                line = self._line.of(self._model, AnsweredMessage())
                line.logprobs = logprobs
                yield line
            if delta.finish is not None:
                yield self._last(delta.finish)

    def encode(self, event: Line) -> bytes:
        return encode_line(event)

    def end(self, failure: Failure | None) -> bytes:
        """Nothing, or a line with the error."""
        return b"" if failure is None else encode_line(error_body(failure))

    async def fold(self, events: AsyncIterator[Line]) -> Line:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[OllamaCall] = []
        logprobs: list[OllamaLogprob] = []
        line: Line | None = None
        async for line in events:
            said = line.said()
            texts.append(said.content)
            thoughts.append(said.thinking or "")
            calls += said.tool_calls or []
            logprobs += line.logprobs or []
        assert line is not None, "an answer has a last line"
        said = AnsweredMessage(
            content="".join(texts),
            thinking="".join(thoughts) or UNSET,
            tool_calls=calls or UNSET,
        )
        whole = self._line.of(self._model, said)
        for name in AnswerLine.__struct_fields__:
            setattr(whole, name, getattr(line, name))
        whole.logprobs = logprobs or UNSET
        return whole

    def _last(self, finish: Finish) -> Line:
        line = self._line.of(self._model, AnsweredMessage())
        timings, usage, finishes = finish.timings, finish.usage, {0: finish}
        line.done, line.done_reason = True, finish.reason
        line.total_duration = time.perf_counter_ns() - self._begun_ns
        line.load_duration = _ns(timings.queued_s)
        line.prompt_eval_count = usage.prompt_tokens
        line.prompt_eval_duration = _ns(timings.prefill_s)
        line.eval_count = usage.completion_tokens
        line.eval_duration = _ns(timings.decode_s)
        line.timings, line.luceasync = timings_of(finishes), luceasync_of(finishes)
        return line


class CallParts:
    """Turns deltas into messages, and holds the parts of a call until it is complete."""

    def __init__(self) -> None:
        self._call: CallPiece | None = None
        self._written: list[str] = []

    def messages(self, delta: Delta) -> Iterator[AnsweredMessage]:
        """The messages that the delta adds to the answer, in order."""
        for piece in delta.pieces:
            match piece:
                case ArgumentsPiece(_, text):
                    self._written.append(text)
                case CallPiece():
                    yield from self._whole()
                    self._call = piece
                case TextPiece(text):
                    yield from self._whole()
                    yield AnsweredMessage(content=text)
                case ReasoningPiece(text):
                    yield from self._whole()
                    yield AnsweredMessage(thinking=text)
        if delta.finish is not None:
            yield from self._whole()

    def _whole(self) -> Iterator[AnsweredMessage]:
        """The call that has just ended, if any."""
        if self._call is None:
            return
        arguments = _arguments("".join(self._written))
        function = FunctionCall(self._call.index, self._call.name, arguments)
        yield AnsweredMessage(tool_calls=[OllamaCall(self._call.id, function)])
        self._call = None
        self._written.clear()


def _arguments(text: str) -> msgspec.Raw:
    """The object as the model wrote it, on one line. Text that was cut off is kept under a key that
    no client takes for an argument.
    """
    written = with_whole_characters(text.encode())
    try:
        msgspec.json.decode(written or b"{}", type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode({"unfinished_arguments": text}))
    # These occur between values only: they would be invalid within a string.
    return msgspec.Raw(written.replace(b"\n", b" ").replace(b"\r", b" ") or b"{}")


def _logprobs(delta: Delta) -> list[OllamaLogprob] | UnsetType:
    if not delta.logprobs:
        return UNSET
    return [_logprob(one, [_logprob(top) for top in one.top]) for one in delta.logprobs]


def _logprob(one: TokenLogprob, top: list[OllamaLogprob] | UnsetType = UNSET) -> OllamaLogprob:
    return OllamaLogprob(one.token, max(one.logprob, MIN_LOGPROB), list(one.token_bytes), top)


def _ns(seconds: float) -> int:
    """Nanoseconds, at least 1: clients divide by them."""
    return max(1, round(seconds * NS))

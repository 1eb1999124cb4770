"""POST /v1/chat/completions: the chunks of an answer, and the plain answer as a fold of them.

Source: OpenAI's OpenAPI document. Owns which chunk has which fields, and when it is sent.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers

from luceasync.request import (
    ArgumentsPiece,
    CallPiece,
    Delta,
    Engine,
    Finish,
    Piece,
    ReasoningPiece,
    Request,
    Stream,
    TextPiece,
)
from luceasync.server.answer_stats import LuceasyncBody, TimingsBody, luceasync_of, timings_of
from luceasync.server.failures import Failure
from luceasync.server.family import BodySpec
from luceasync.server.http.auth import Caller
from luceasync.server.http.responses import encode_event
from luceasync.server.openai.chat_body import ChatBody, ParsedChat, parse_chat
from luceasync.server.openai.common import (
    DONE,
    DONE_DATA,
    SYSTEM_FINGERPRINT,
    CompletionTokensDetails,
    LogprobEntry,
    OpenAiError,
    ReasoningTokens,
    UsageBody,
    entries_of,
    error_body,
    usage_of,
)
from luceasync.server.openai.custom_tools import input_of


class ChoiceLogprobs(msgspec.Struct):
    content: list[LogprobEntry]
    refusal: None = None


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """The first delta of a call has the name; every delta has a part of the arguments."""

    arguments: str = msgspec.field(default_factory=str)
    name: str | None = None


class CustomDelta(msgspec.Struct, omit_defaults=True):
    """Like FunctionDelta, for a call of a custom tool."""

    input: str = msgspec.field(default_factory=str)
    name: str | None = None


class CallDelta(msgspec.Struct, omit_defaults=True):
    """A part of call `index`; the first one has its id and type. A call of a custom tool has
    `custom` instead of `function`.
    """

    index: int
    function: FunctionDelta | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    custom: CustomDelta | None = None


class DeltaMessage(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: DeltaMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct):
    """One event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    timings: TimingsBody | UnsetType = UNSET
    luceasync: LuceasyncBody | UnsetType = UNSET

    @property
    def text(self) -> str:
        """The text that the chunk adds to the first choice."""
        return "".join([each.delta.content or "" for each in self.choices if each.index == 0])


class AnswerFunction(msgspec.Struct):
    """`arguments` is the text of a JSON object, unless the answer was cut off."""

    name: str
    arguments: str


class AnswerCall(msgspec.Struct):
    id: str
    function: AnswerFunction
    type: Literal["function"] = "function"


class CustomInput(msgspec.Struct):
    name: str
    input: str


class AnswerCustomCall(msgspec.Struct):
    """A call of a custom tool."""

    id: str
    custom: CustomInput
    type: Literal["custom"] = "custom"


class AnswerMessage(msgspec.Struct):
    """`content` is None if the answer consists of calls only."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall | AnswerCustomCall] | UnsetType = UNSET


class AnswerChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct):
    """The plain answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[AnswerChoice]
    usage: UsageBody | UnsetType | None
    timings: TimingsBody | UnsetType
    luceasync: LuceasyncBody | UnsetType

    @property
    def text(self) -> str:
        """The text of the first choice; empty if it consists of calls only."""
        return self.choices[0].message.content or ""


class ChatEvents:
    """Turns the deltas of one Stream into chunks, in the order of sending.

    Every choice begins with its role and ends with its finish reason. The last chunk has the
    statistics; with `include_usage` that is the chunk without choices, which has the usage too.
    """

    def __init__(self, chat: ParsedChat, model: str, num_prompt_tokens: int) -> None:
        self._chat = chat
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._finishes: dict[int, Finish] = {}
        self._calling: set[int] = set()  # choices that have called a tool
        self._custom: set[tuple[int, int]] = set()  # choice and index of calls of custom tools
        self._reasoning = [ReasoningTokens() for _ in range(chat.request.num_choices)]
        self._id = f"chatcmpl-{random.getrandbits(128):032x}"
        self._created = int(time.time())

    async def chunks(self, stream: Stream) -> AsyncGenerator[ChatChunk, None]:
        """All chunks of the answer. Raises what `stream` raises."""
        roles_sent = False
        async for delta in stream:
            if not roles_sent:
                roles_sent = True
                for chunk in self._roles():
                    yield chunk
            for chunk in self._chunks_of(delta):
                yield chunk
        if self._chat.include_usage:
            usage = usage_of(self._finishes)
            usage.completion_tokens_details = self._details()
            yield self._last_chunk([], usage)

    def _roles(self) -> Iterator[ChatChunk]:
        for index in range(self._chat.request.num_choices):
            message = DeltaMessage(role="assistant", content="")
            yield self._chunk([ChunkChoice(index, message)])

    def _chunks_of(self, delta: Delta) -> Iterator[ChatChunk]:
        self._num_completion_tokens += len(delta.token_ids)
        self._reasoning[delta.index].take(delta)
        logprobs = ChoiceLogprobs(entries_of(delta.logprobs)) if delta.logprobs else None
        for piece in self._shown(delta):
            if isinstance(piece, CallPiece):
                self._calling.add(delta.index)
            yield self._chunk(
                [ChunkChoice(delta.index, self._message(delta.index, piece), logprobs)]
            )
            logprobs = None  # the first chunk has those of all tokens of the delta
        if logprobs is not None:
            yield self._chunk([ChunkChoice(delta.index, DeltaMessage(content=""), logprobs)])
        if delta.finish is not None:
            self._finishes[delta.index] = delta.finish
            all_finished = len(self._finishes) == self._chat.request.num_choices
            is_last = all_finished and not self._chat.include_usage
            reason = self._reason(delta.index, delta.finish)
            choice = ChunkChoice(delta.index, DeltaMessage(), None, reason)
            yield self._last_chunk([choice]) if is_last else self._chunk([choice])

    def _message(self, choice: int, piece: Piece) -> DeltaMessage:
        """The delta for a piece; calls of custom tools have their own type."""
        match piece:
            case CallPiece(index, call_id, name) if name in self._chat.custom_tools:
                self._custom.add((choice, index))
                custom = CustomDelta(name=name)
                return _calling(CallDelta(index, id=call_id, type="custom", custom=custom))
            case ArgumentsPiece(index, text) if (choice, index) in self._custom:
                return _calling(CallDelta(index, custom=CustomDelta(input_of(text))))
            case _:
                return _message(piece)

    def _shown(self, delta: Delta) -> Iterator[Piece]:
        """The pieces that the client requested."""
        for piece in delta.pieces:
            if self._chat.shows_reasoning or not isinstance(piece, ReasoningPiece):
                yield piece
        if self._chat.shows_stop and delta.finish is not None and delta.finish.stop:
            yield TextPiece(delta.finish.stop)

    def _reason(self, index: int, finish: Finish) -> str:
        """The finish reason; a choice that stops after a call waits for the tool's result."""
        is_call = finish.reason == "stop" and index in self._calling
        return "tool_calls" if is_call else finish.reason

    def _last_chunk(
        self, choices: list[ChunkChoice], usage: UsageBody | UnsetType = UNSET
    ) -> ChatChunk:
        chunk = self._chunk(choices, usage)
        chunk.timings = timings_of(self._finishes)
        chunk.luceasync = luceasync_of(self._finishes)
        return chunk

    def _chunk(self, choices: list[ChunkChoice], usage: UsageBody | UnsetType = UNSET) -> ChatChunk:
        shown: UsageBody | UnsetType | None = usage
        if usage is UNSET and self._chat.include_usage:
            shown = self._running_usage() if self._chat.continuous_usage else None
        return ChatChunk(
            self._id,
            "chat.completion.chunk",
            self._created,
            self._model,
            SYSTEM_FINGERPRINT,
            choices,
            shown,
        )

    def _running_usage(self) -> UsageBody:
        prompt, completion = self._num_prompt_tokens, self._num_completion_tokens
        total = prompt + completion
        return UsageBody(prompt, completion, total, completion_tokens_details=self._details())

    def _details(self) -> CompletionTokensDetails:
        return CompletionTokensDetails(sum(each.count for each in self._reasoning))


class ChatMessageFold:
    """Folds the deltas of one choice into its message."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[CallDelta, list[str]]] = {}

    def take(self, delta: DeltaMessage) -> None:
        """Add the next delta."""
        self._content.append(delta.content or "")
        self._reasoning.append(delta.reasoning_content or "")
        for call in delta.tool_calls or ():
            _, written = self._calls.setdefault(call.index, (call, []))
            if call.function is not None:
                written.append(call.function.arguments)
            if call.custom is not None:
                written.append(call.custom.input)

    def message(self) -> AnswerMessage:
        """The message so far."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = [_call(call, "".join(written)) for call, written in self._calls.values()]
        return AnswerMessage(
            "assistant",
            content if content or not calls else None,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )


class ChatFold:
    """Folds the chunks of one answer into the plain answer."""

    def __init__(self) -> None:
        self._messages: dict[int, ChatMessageFold] = {}
        self._logprobs: dict[int, list[LogprobEntry]] = {}
        self._finish_reasons: dict[int, str] = {}
        self._last: ChatChunk | None = None

    def take(self, chunk: ChatChunk) -> None:
        """Add the next chunk."""
        self._last = chunk
        for choice in chunk.choices:
            self._messages.setdefault(choice.index, ChatMessageFold()).take(choice.delta)
            if choice.logprobs is not None:
                self._logprobs.setdefault(choice.index, []).extend(choice.logprobs.content)
            if choice.finish_reason is not None:
                self._finish_reasons[choice.index] = choice.finish_reason

    def completion(self) -> ChatCompletion:
        """The answer, after its last chunk."""
        last = self._last
        assert last is not None, "an answer has at least a chunk for each role"
        return ChatCompletion(
            last.id,
            "chat.completion",
            last.created,
            last.model,
            last.system_fingerprint,
            [self._choice(index) for index in sorted(self._messages)],
            last.usage,
            last.timings,
            last.luceasync,
        )

    def _choice(self, index: int) -> AnswerChoice:
        entries = self._logprobs.get(index)
        return AnswerChoice(
            index,
            self._messages[index].message(),
            None if entries is None else ChoiceLogprobs(entries),
            self._finish_reasons[index],
        )


def _call(first: CallDelta, written: str) -> AnswerCall | AnswerCustomCall:
    """The call whose first delta is `first`, with the joined text of all its deltas."""
    if first.custom is not None:
        return AnswerCustomCall(first.id or "", CustomInput(first.custom.name or "", written))
    name = first.function.name if first.function is not None else None
    return AnswerCall(first.id or "", AnswerFunction(name or "", written))


def _calling(call: CallDelta) -> DeltaMessage:
    return DeltaMessage(tool_calls=[call])


def _message(piece: Piece) -> DeltaMessage:
    match piece:
        case TextPiece(text):
            return DeltaMessage(content=text)
        case ReasoningPiece(text):
            return DeltaMessage(reasoning_content=text)
        case CallPiece(index, call_id, name):
            function = FunctionDelta(arguments="", name=name)
            return _calling(CallDelta(index, function, call_id, "function"))
        case ArgumentsPiece(index, text):
            return _calling(CallDelta(index, FunctionDelta(text)))


EXAMPLE = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 100,
    "stream": True,
}


class ChatCompletions:
    """Answer a chat."""

    path = "/v1/chat/completions"
    body = BodySpec(ChatBody, ChatCompletion, OpenAiError, ChatChunk, EXAMPLE, DONE_DATA)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> ChatCall:
        card = self._engine.card
        return ChatCall(parse_chat(body, card, caller, headers), card.name)


class ChatCall:
    """A parsed request. The plain answer always includes the usage."""

    def __init__(self, chat: ParsedChat, model: str) -> None:
        self._chat = chat if chat.stream else replace(chat, include_usage=True)
        self._model = model

    @property
    def requests(self) -> Sequence[Request]:
        return (self._chat.request,)

    @property
    def stream(self) -> bool:
        return self._chat.stream

    def events(self, streams: Sequence[Stream]) -> AsyncGenerator[ChatChunk, None]:
        [stream] = streams
        return ChatEvents(self._chat, self._model, stream.num_prompt_tokens).chunks(stream)

    def encode(self, event: ChatChunk) -> bytes:
        return encode_event(event)

    def end(self, failure: Failure | None) -> bytes:
        """[DONE], or an error event without it."""
        return DONE if failure is None else encode_event(error_body(failure))

    async def fold(self, events: AsyncIterator[ChatChunk]) -> ChatCompletion:
        fold = ChatFold()
        async for chunk in events:
            fold.take(chunk)
        return fold.completion()

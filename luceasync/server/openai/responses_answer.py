"""POST /v1/responses: the events of a response, and the response itself, which they build up.

Source: OpenAI's OpenAPI document, `Response` and `ResponseStreamEvent`. Owns which piece begins,
continues or ends which item.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers

from luceasync.request import (
    ArgumentsPiece,
    CallPiece,
    Delta,
    Engine,
    Finish,
    ModelCard,
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
from luceasync.server.openai.common import LogprobEntry, OpenAiError, ReasoningTokens, entries_of
from luceasync.server.openai.custom_tools import input_of
from luceasync.server.openai.responses_body import (
    CLIENT_TOOLS,
    OfferedTools,
    ParsedResponses,
    ResponsesBody,
    parse_responses,
)
from luceasync.server.openai.responses_items import InputItem, ResponseStore

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct):
    text: str = ""
    annotations: list[None] = msgspec.field(default_factory=list)
    type: Literal["output_text"] = "output_text"
    logprobs: list[LogprobEntry] | UnsetType = UNSET


class SummaryText(msgspec.Struct):
    """The model's complete reasoning: nothing is summarised here."""

    text: str = ""
    type: Literal["summary_text"] = "summary_text"


class MessageItem(msgspec.Struct):
    id: str
    status: ItemStatus = "in_progress"
    content: list[OutputText] = msgspec.field(default_factory=list)
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class ReasoningItem(msgspec.Struct):
    id: str
    status: ItemStatus = "in_progress"
    summary: list[SummaryText] = msgspec.field(default_factory=list)
    type: Literal["reasoning"] = "reasoning"


class CallItem(msgspec.Struct):
    id: str
    call_id: str
    name: str
    status: ItemStatus = "in_progress"
    arguments: str = ""
    type: Literal["function_call"] = "function_call"
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct):
    """A call of a custom tool, whose input is one text."""

    id: str
    call_id: str
    name: str
    status: ItemStatus = "in_progress"
    input: str = ""
    type: Literal["custom_tool_call"] = "custom_tool_call"
    namespace: str | UnsetType = UNSET


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputDetails(msgspec.Struct):
    """Details of the input tokens. Writes to the cache are not charged."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponsesError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """The plain answer, which several events contain too."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    output: list[OutputItem] = msgspec.field(default_factory=list)
    usage: ResponsesUsage | None = None
    error: ResponsesError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: Any
    tools: list[Any]
    top_p: float
    previous_response_id: str | None
    store: bool
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"
    timings: TimingsBody | UnsetType = UNSET
    luceasync: LuceasyncBody | UnsetType = UNSET


class ResponsesEvent(msgspec.Struct, omit_defaults=True):
    """One event; its type determines which fields it has."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    item_id: str | None = None
    content_index: int | None = None
    summary_index: int | None = None
    item: OutputItem | None = None
    part: OutputText | SummaryText | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    input: str | None = None
    name: str | None = None
    logprobs: list[LogprobEntry] | None = None


class ResponsesEvents:
    """Turns the deltas of one Stream into events, and updates `response` accordingly. `keep` is
    called with the complete response before its last event.
    """

    def __init__(
        self,
        response: ResponseObject,
        tools: OfferedTools,
        keep: Callable[[ResponseObject], None] = lambda response: None,
    ) -> None:
        self.response = response
        self._tools = tools
        self._keep = keep
        self._custom_arguments = ""  # of the open call of a custom tool
        self._logprobs: list[LogprobEntry] = []  # of tokens whose text has not arrived yet
        self._num_events = 0
        self._open: OutputItem | None = None
        self._reasoning = ReasoningTokens()

    async def events(self, stream: Stream) -> AsyncGenerator[ResponsesEvent, None]:
        """All events of the response. Raises what `stream` raises."""
        has_begun = False
        async for delta in stream:
            if not has_begun:
                has_begun = True
                yield self._event("response.created", response=deepcopy(self.response))
                yield self._event("response.in_progress", response=deepcopy(self.response))
            for event in self._events_of(delta):
                yield event

    def failed(self, failure: Failure) -> ResponsesEvent:
        """The last event of a response that failed midway."""
        self.response.status = "failed"
        self.response.error = ResponsesError(failure.code or "server_error", failure.message)
        return self._event("response.failed", response=self.response)

    def _events_of(self, delta: Delta) -> Iterator[ResponsesEvent]:
        self._reasoning.take(delta)
        self._logprobs += entries_of(delta.logprobs)
        for piece in delta.pieces:
            yield from self._events_of_piece(piece)
        if delta.finish is not None:
            is_cut = delta.finish.reason == "length"
            yield from self._close("incomplete" if is_cut else "completed")
            yield self._end(delta.finish)

    def _events_of_piece(self, piece: Piece) -> Iterator[ResponsesEvent]:
        match piece:
            case TextPiece(text):
                if not isinstance(self._open, MessageItem):
                    yield from self._begin(MessageItem(_new_id("msg")))
                    part = OutputText()
                    yield self._item_event(
                        "response.content_part.added", content_index=0, part=part
                    )
                logprobs, self._logprobs = self._logprobs, []
                yield self._item_event(
                    "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs
                )
                self._message.text += text
                if logprobs:
                    self._message.logprobs = [*(self._message.logprobs or ()), *logprobs]
            case ReasoningPiece(text):
                self._logprobs.clear()
                if not isinstance(self._open, ReasoningItem):
                    yield from self._begin(ReasoningItem(_new_id("rs")))
                    added = "response.reasoning_summary_part.added"
                    yield self._item_event(added, summary_index=0, part=SummaryText())
                yield self._item_event(
                    "response.reasoning_summary_text.delta", summary_index=0, delta=text
                )
                self._summary.text += text
            case CallPiece(_, call_id, name):
                self._logprobs.clear()
                yield from self._begin(self._call_item(call_id, name))
            case ArgumentsPiece(_, text) if isinstance(self._open, CustomCallItem):
                self._custom_arguments += text
            case ArgumentsPiece(_, text):
                yield self._item_event("response.function_call_arguments.delta", delta=text)
                assert isinstance(self._open, CallItem), "arguments follow the beginning of a call"
                self._open.arguments += text

    def _call_item(self, call_id: str, name: str) -> CallItem | CustomCallItem:
        """The item at the beginning of a call, under the client's name for the tool."""
        tool = self._tools.by_name.get(name)
        if tool is None:
            return CallItem(_new_id("fc"), call_id, name)
        namespace = tool.namespace or UNSET
        if tool.is_custom:
            return CustomCallItem(_new_id("ctc"), call_id, tool.name, namespace=namespace)
        return CallItem(_new_id("fc"), call_id, tool.name, namespace=namespace)

    @property
    def _message(self) -> OutputText:
        assert isinstance(self._open, MessageItem)
        if not self._open.content:
            self._open.content.append(OutputText())
        return self._open.content[0]

    @property
    def _summary(self) -> SummaryText:
        assert isinstance(self._open, ReasoningItem)
        if not self._open.summary:
            self._open.summary.append(SummaryText())
        return self._open.summary[0]

    def _begin(self, item: OutputItem) -> Iterator[ResponsesEvent]:
        yield from self._close("completed")
        self._open = item
        self.response.output.append(item)
        yield self._output_event("response.output_item.added", item=deepcopy(item))

    def _close(self, status: ItemStatus) -> Iterator[ResponsesEvent]:
        item = self._open
        match item:
            case None:
                return
            case MessageItem():
                part = self._message
                done, logprobs = "response.output_text.done", part.logprobs or []
                yield self._item_event(done, content_index=0, text=part.text, logprobs=logprobs)
                yield self._item_event("response.content_part.done", content_index=0, part=part)
            case ReasoningItem():
                summary = self._summary
                done = "response.reasoning_summary_text.done"
                yield self._item_event(done, summary_index=0, text=summary.text)
                done = "response.reasoning_summary_part.done"
                yield self._item_event(done, summary_index=0, part=summary)
            case CallItem(_, _, name, _, arguments):
                done = "response.function_call_arguments.done"
                yield self._item_event(done, name=name, arguments=arguments)
            case CustomCallItem():
                item.input, self._custom_arguments = input_of(self._custom_arguments), ""
                kind = "response.custom_tool_call_input"
                yield self._item_event(f"{kind}.delta", delta=item.input)
                yield self._item_event(f"{kind}.done", input=item.input)
        item.status = status
        yield self._output_event("response.output_item.done", item=item)
        self._open = None

    def _end(self, finish: Finish) -> ResponsesEvent:
        response, finishes = self.response, {0: finish}
        response.usage = _usage(finish, self._reasoning.count)
        response.timings, response.luceasync = timings_of(finishes), luceasync_of(finishes)
        if finish.reason == "length":
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            response.status = "completed"
        self._keep(response)
        return self._event(f"response.{response.status}", response=response)

    def _item_event(self, kind: str, **fields: Any) -> ResponsesEvent:
        """An event with the id of the open item."""
        assert self._open is not None
        return self._output_event(kind, item_id=self._open.id, **fields)

    def _output_event(self, kind: str, **fields: Any) -> ResponsesEvent:
        return self._event(kind, output_index=len(self.response.output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponsesEvent:
        event = ResponsesEvent(kind, self._num_events, **fields)
        self._num_events += 1
        return event


def _new_id(kind: str) -> str:
    return f"{kind}_{random.getrandbits(128):032x}"


def _usage(finish: Finish, num_reasoning_tokens: int) -> ResponsesUsage:
    used = finish.usage
    return ResponsesUsage(
        used.prompt_tokens,
        InputDetails(used.cached_tokens),
        used.completion_tokens,
        OutputDetails(num_reasoning_tokens),
        used.prompt_tokens + used.completion_tokens,
    )


class Responses:
    """Answer a conversation that consists of items."""

    path = "/v1/responses"
    body = BodySpec(
        ResponsesBody,
        ResponseObject,
        OpenAiError,
        ResponsesEvent,
        {"input": "Hello", "max_output_tokens": 100},
    )

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = ResponseStore()

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> ResponsesCall:
        card = self._engine.card
        parsed = parse_responses(body, card, caller, headers, self._store)

        def keep(response: ResponseObject) -> None:
            if response.store:
                output = msgspec.json.decode(
                    msgspec.json.encode(response.output), type=list[InputItem]
                )
                self._store.keep(parsed.request.tenant, response.id, [*parsed.items, *output])

        return ResponsesCall(parsed, ResponsesEvents(_response(parsed, card), parsed.tools, keep))


class ResponsesCall:
    def __init__(self, parsed: ParsedResponses, events: ResponsesEvents) -> None:
        self.requests: Sequence[Request] = (parsed.request,)
        self.stream = bool(parsed.body.stream)
        self._events = events

    def events(self, streams: Sequence[Stream]) -> AsyncGenerator[ResponsesEvent, None]:
        [stream] = streams
        return self._events.events(stream)

    def encode(self, event: ResponsesEvent) -> bytes:
        return encode_event(event, event.type)

    def end(self, failure: Failure | None) -> bytes:
        if failure is None:
            return b""
        return self.encode(self._events.failed(failure))

    async def fold(self, events: AsyncIterator[ResponsesEvent]) -> ResponseObject:
        async for _ in events:
            pass
        return self._events.response


def _response(parsed: ParsedResponses, card: ModelCard) -> ResponseObject:
    """The response before the first piece of output."""
    body, request = parsed.body, parsed.request
    return ResponseObject(
        id=f"resp_{random.getrandbits(128):032x}",
        created_at=int(time.time()),
        model=card.name,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=request.sampling.temperature,
        tool_choice=body.tool_choice or "auto",
        tools=[tool.echo() for tool in body.tools or () if tool.type in CLIENT_TOOLS],
        top_p=request.sampling.top_p,
        previous_response_id=body.previous_response_id,
        store=body.store is not False,
    )

"""The shapes of a response, its items and its events.

Source: OpenAI's OpenAPI document, `Response` and `ResponseStreamEvent`. Owns field names.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from copy import deepcopy
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers

from luceasync.errors import RequestError
from luceasync.request import (
    ArgumentsPiece,
    CallPiece,
    Constraint,
    Delta,
    Engine,
    Finish,
    ModelCard,
    Piece,
    ReasoningPiece,
    Request,
    Sampling,
    Stream,
    TextPiece,
)
from luceasync.server.answer_stats import LuceasyncBody, TimingsBody, luceasync_of, timings_of
from luceasync.server.failures import Failure
from luceasync.server.family import Form
from luceasync.server.fields import (
    conversation_of,
    decode,
    in_range,
    in_range_or,
    most_tokens,
    pins_of,
    refuse,
)
from luceasync.server.http.auth import Caller
from luceasync.server.http.responses import encode_event
from luceasync.server.openai.common import unknown_model
from luceasync.server.openai.responses_body import ResponsesBody, effort_of, prompt_of
from luceasync.server.openai.sampling import TYPES, priority_of, schema_constraint

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct):
    text: str = ""
    annotations: list[None] = msgspec.field(default_factory=list)
    type: Literal["output_text"] = "output_text"


class SummaryText(msgspec.Struct):
    """What the model thought, whole: nothing is summed up here."""

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


Item = MessageItem | ReasoningItem | CallItem


class InputDetails(msgspec.Struct):
    cached_tokens: int


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ErrorBody(msgspec.Struct):
    code: str
    message: str


class Incomplete(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class Response(msgspec.Struct, kw_only=True):
    """The plain answer, and what several events carry."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    output: list[Item] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    error: ErrorBody | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: Any
    tools: list[Any]
    top_p: float
    previous_response_id: None = None
    store: bool = False
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"
    timings: TimingsBody | UnsetType = UNSET
    luceasync: LuceasyncBody | UnsetType = UNSET


class Event(msgspec.Struct, omit_defaults=True):
    """One event; which fields it has follows from its type."""

    type: str
    sequence_number: int
    response: Response | None = None
    output_index: int | None = None
    item_id: str | None = None
    content_index: int | None = None
    summary_index: int | None = None
    item: Item | None = None
    part: OutputText | SummaryText | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    name: str | None = None
    logprobs: tuple[()] | None = None


class ResponseEvents:
    """Turns the deltas of one Stream into events, and keeps `response` as they tell it."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self._num_events = 0
        self._open: Item | None = None
        self._num_reasoning_tokens = 0

    async def events(self, stream: Stream) -> AsyncGenerator[Event, None]:
        """All of them. Raises what `stream` raises."""
        has_begun = False
        async for delta in stream:
            if not has_begun:
                has_begun = True
                yield self._event("response.created", response=deepcopy(self.response))
                yield self._event("response.in_progress", response=deepcopy(self.response))
            for event in self._events_of(delta):
                yield event

    def failed(self, failure: Failure) -> Event:
        """The last event of a response that broke off."""
        self.response.status = "failed"
        self.response.error = ErrorBody(failure.code or "server_error", failure.message)
        return self._event("response.failed", response=self.response)

    def _events_of(self, delta: Delta) -> Iterator[Event]:
        if all(isinstance(piece, ReasoningPiece) for piece in delta.pieces) and (
            delta.pieces or isinstance(self._open, ReasoningItem)
        ):
            self._num_reasoning_tokens += len(delta.token_ids)
        for piece in delta.pieces:
            yield from self._said(piece)
        if delta.finish is not None:
            is_cut = delta.finish.reason == "length"
            yield from self._close("incomplete" if is_cut else "completed")
            yield self._ended(delta.finish)

    def _said(self, piece: Piece) -> Iterator[Event]:
        match piece:
            case TextPiece(text):
                if not isinstance(self._open, MessageItem):
                    yield from self._begin(MessageItem(_new_id("msg")))
                    part = OutputText()
                    yield self._at("response.content_part.added", content_index=0, part=part)
                yield self._at(
                    "response.output_text.delta", content_index=0, delta=text, logprobs=()
                )
                self._message.text += text
            case ReasoningPiece(text):
                if not isinstance(self._open, ReasoningItem):
                    yield from self._begin(ReasoningItem(_new_id("rs")))
                    added = "response.reasoning_summary_part.added"
                    yield self._at(added, summary_index=0, part=SummaryText())
                yield self._at("response.reasoning_summary_text.delta", summary_index=0, delta=text)
                self._thought.text += text
            case CallPiece(_, call_id, name):
                yield from self._begin(CallItem(_new_id("fc"), call_id, name))
            case ArgumentsPiece(_, text):
                yield self._at("response.function_call_arguments.delta", delta=text)
                assert isinstance(self._open, CallItem), "arguments follow the beginning of a call"
                self._open.arguments += text

    @property
    def _message(self) -> OutputText:
        assert isinstance(self._open, MessageItem)
        if not self._open.content:
            self._open.content.append(OutputText())
        return self._open.content[0]

    @property
    def _thought(self) -> SummaryText:
        assert isinstance(self._open, ReasoningItem)
        if not self._open.summary:
            self._open.summary.append(SummaryText())
        return self._open.summary[0]

    def _begin(self, item: Item) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = item
        self.response.output.append(item)
        yield self._placed("response.output_item.added", item=deepcopy(item))

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        item = self._open
        match item:
            case None:
                return
            case MessageItem():
                part = self._message
                yield self._at(
                    "response.output_text.done", content_index=0, text=part.text, logprobs=()
                )
                yield self._at("response.content_part.done", content_index=0, part=part)
            case ReasoningItem():
                thought = self._thought
                done = "response.reasoning_summary_text.done"
                yield self._at(done, summary_index=0, text=thought.text)
                done = "response.reasoning_summary_part.done"
                yield self._at(done, summary_index=0, part=thought)
            case CallItem(_, _, name, _, arguments):
                done = "response.function_call_arguments.done"
                yield self._at(done, name=name, arguments=arguments)
        item.status = status
        yield self._placed("response.output_item.done", item=item)
        self._open = None

    def _ended(self, finish: Finish) -> Event:
        response, finishes = self.response, {0: finish}
        response.usage = _usage(finish, self._num_reasoning_tokens)
        response.timings, response.luceasync = timings_of(finishes), luceasync_of(finishes)
        if finish.reason == "length":
            response.status, response.incomplete_details = (
                "incomplete",
                Incomplete("max_output_tokens"),
            )
        else:
            response.status = "completed"
        return self._event(f"response.{response.status}", response=response)

    def _at(self, kind: str, **fields: Any) -> Event:
        """An event of the open item."""
        assert self._open is not None
        return self._placed(kind, item_id=self._open.id, **fields)

    def _placed(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, output_index=len(self.response.output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = Event(kind, self._num_events, **fields)
        self._num_events += 1
        return event


def _new_id(kind: str) -> str:
    return f"{kind}_{random.getrandbits(128):032x}"


def _usage(finish: Finish, num_reasoning_tokens: int) -> Usage:
    used = finish.usage
    return Usage(
        used.prompt_tokens,
        InputDetails(used.cached_tokens),
        used.completion_tokens,
        OutputDetails(num_reasoning_tokens),
        used.prompt_tokens + used.completion_tokens,
    )


# POST /v1/responses, as a body and an answer. Owns which of its parts does what when, and the
# ranges of what is asked. Knows nothing of who drives it: see luceasync.server.family.


_decoder = msgspec.json.Decoder(ResponsesBody)


class Responses:
    """See luceasync.server.family.Endpoint."""

    path = "/v1/responses"
    form = Form(ResponsesBody, streams=True)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> ResponseCall:
        card = self._engine.card
        asked = decode(_decoder, body)
        _refuse_unserved(asked, card)
        request = Request(
            prompt_of(asked),
            sampling=_sampling(asked),
            max_tokens=_max_tokens(asked),
            pins=pins_of(asked.kvflash_pin),
            constraint=_constraint(asked),
            most_reasoning_tokens=most_tokens("reasoning.effort", effort_of(asked)),
            priority=priority_of(asked.priority),
            tenant=caller.tenant(None),
            client=caller.client,
            conversation=conversation_of(headers, asked.prompt_cache_key),
        )
        return ResponseCall(request, bool(asked.stream), _response(asked, request, card))


class ResponseCall:
    """See luceasync.server.family.Call."""

    def __init__(self, request: Request, stream: bool, response: Response) -> None:
        self.requests: Sequence[Request] = (request,)
        self.stream = stream
        self._events = ResponseEvents(response)

    def events(self, streams: Sequence[Stream]) -> AsyncGenerator[Event, None]:
        [stream] = streams
        return self._events.events(stream)

    def encode(self, event: Event) -> bytes:
        return encode_event(event, event.type)

    def end(self, failure: Failure | None) -> bytes:
        if failure is None:
            return b""
        return self.encode(self._events.failed(failure))

    async def fold(self, events: AsyncIterator[Event]) -> Response:
        async for _ in events:
            pass
        return self._events.response


def _refuse_unserved(body: ResponsesBody, card: ModelCard) -> None:
    if body.model is not None and not card.serves(body.model):
        raise unknown_model(body.model, card)
    if body.previous_response_id is not None:
        raise RequestError(
            "'previous_response_id' is not served: no response is stored here. Send the whole "
            "conversation as `input`; what was computed for it is found again.",
            param="previous_response_id",
        )
    if bytes(body.conversation) not in (b"", b"null"):
        raise RequestError("'conversation' is not served: leave it out.", param="conversation")
    if body.background:
        refuse("background", True, "false (nothing runs in the background here)")


def _sampling(body: ResponsesBody) -> Sampling:
    top_p = in_range_or(1.0, "top_p", body.top_p, 0.0, 1.0)
    if top_p == 0:
        refuse("top_p", top_p, "a number above 0, at most 1")
    temperature = in_range_or(1.0, "temperature", body.temperature, 0.0, 2.0)
    return Sampling(temperature=temperature, top_p=top_p)


def _max_tokens(body: ResponsesBody) -> int | None:
    most = body.max_output_tokens
    return None if most is None else in_range("max_output_tokens", most, 1, 2**31 - 1)


def _constraint(body: ResponsesBody) -> Constraint | None:
    form = body.text.format if body.text is not None else None
    match None if form is None else form.type:
        case None | "text":
            return None
        case "json_object":
            return Constraint("json_object", "", "text.format")
        case "json_schema":
            assert form is not None
            where = "text.format.schema"
            return schema_constraint(form.schema, where, strict=form.strict is True)
        case other:
            refuse("text.format.type", other, TYPES)


def _response(body: ResponsesBody, request: Request, card: ModelCard) -> Response:
    """What is known of it before anything was said."""
    return Response(
        id=f"resp_{random.getrandbits(128):032x}",
        created_at=int(time.time()),
        model=card.name,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=request.sampling.temperature,
        tool_choice=body.tool_choice or "auto",
        tools=[tool for tool in body.tools or () if tool.type == "function"],
        top_p=request.sampling.top_p,
    )

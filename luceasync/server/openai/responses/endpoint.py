"""POST /v1/responses, as a body and an answer.

Owns which of its parts does what when, and the ranges of what is asked. Knows nothing of who drives
it: see luceasync.server.family.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import msgspec
from starlette.datastructures import Headers

from luceasync.constraint import Constraint
from luceasync.errors import RequestError
from luceasync.model_card import ModelCard
from luceasync.request import Engine, Request, Sampling, Stream
from luceasync.server.checks import decode, in_range, in_range_or, refuse
from luceasync.server.effort import most_tokens
from luceasync.server.failures import Failure
from luceasync.server.family import Form
from luceasync.server.hints import conversation_of
from luceasync.server.openai.constraints import TYPES, schema_constraint
from luceasync.server.openai.errors import unknown_model
from luceasync.server.openai.responses.body import ResponsesBody, effort_of
from luceasync.server.openai.responses.conversation import prompt_of
from luceasync.server.openai.responses.events import ResponseEvents
from luceasync.server.openai.responses.shapes import Event, Response
from luceasync.server.openai.sampling import priority_of
from luceasync.server.pins import pins_of
from luceasync.server.sse import encode_event
from luceasync.server.tenant import Caller

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

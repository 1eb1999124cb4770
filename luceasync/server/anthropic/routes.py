"""POST /v1/messages and /v1/messages/count_tokens, as bodies and answers.

Owns which of its parts does what when, and the ranges of what is asked. Knows nothing of who drives
it: see luceasync.server.family.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from luceasync.request import Constraint, Engine, ModelCard, Request, Sampling, Stream
from luceasync.server.answering import require_ready
from luceasync.server.anthropic.answer import (
    Answer,
    AnswerEvents,
    AnswerFold,
    ErrorBody,
    Event,
    error_body,
    unknown_model,
)
from luceasync.server.anthropic.body import CountBody, MessagesBody, prompt_of
from luceasync.server.failures import Failure
from luceasync.server.family import Endpoint, Form, Lookup
from luceasync.server.fields import (
    at_most,
    budget,
    conversation_of,
    cut,
    decode,
    in_range,
    in_range_or,
    most_tokens,
    pins_of,
    refuse,
)
from luceasync.server.http.auth import Caller
from luceasync.server.http.responses import encode_event
from luceasync.server.status_pages import json_response

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_SCHEMA_BYTES = 256 << 10

_messages = msgspec.json.Decoder(MessagesBody)
_counted = msgspec.json.Decoder(CountBody)


class Messages:
    """See luceasync.server.family.Endpoint."""

    path = "/v1/messages"
    form = Form(MessagesBody, streams=True)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> MessageCall:
        card = self._engine.card
        asked = decode(_messages, body)
        if not card.serves(asked.model):
            raise unknown_model(asked.model, card)
        request = _request(asked, caller, conversation_of(headers))
        return MessageCall(request, bool(asked.stream), card.name)


@dataclass(frozen=True, slots=True)
class MessageCall:
    """See luceasync.server.family.Call."""

    request: Request
    stream: bool
    model: str

    @property
    def requests(self) -> Sequence[Request]:
        return (self.request,)

    def events(self, streams: Sequence[Stream]) -> AsyncGenerator[Event, None]:
        [stream] = streams
        return AnswerEvents(self.model, stream.num_prompt_tokens).events(stream)

    def encode(self, event: Event) -> bytes:
        return encode_event(event, event.type)

    def end(self, failure: Failure | None) -> bytes:
        return b"" if failure is None else encode_event(error_body(failure), "error")

    async def fold(self, events: AsyncIterator[Event]) -> Answer:
        fold = AnswerFold()
        async for event in events:
            fold.take(event)
        return fold.answer


class TokenCount(msgspec.Struct):
    """How many tokens a prompt has."""

    input_tokens: int


class CountTokens:
    """See luceasync.server.family.Endpoint."""

    path = "/v1/messages/count_tokens"
    form = Form(CountBody)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> Lookup:
        card = self._engine.card
        asked = decode(_counted, body)
        if not card.serves(asked.model):
            raise unknown_model(asked.model, card)
        request = Request(prompt_of(asked), tenant=caller.tenant(None))

        async def count() -> TokenCount:
            return TokenCount(len(await self._engine.tokens(request)))

        return Lookup(count)


def _request(body: MessagesBody, caller: Caller, conversation: str) -> Request:
    """What the engine is asked. Raises RequestError, which names the field at fault."""
    stops = body.stop_sequences or []
    at_most("stop_sequences", stops, MAX_STOPS, "strings")
    for i, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            refuse(f"stop_sequences[{i}]", stop, f"a string of 1 to {MAX_STOP_CHARS} characters")
    return Request(
        prompt_of(body),
        sampling=_sampling(body),
        max_tokens=in_range("max_tokens", body.max_tokens, 1, 2**31 - 1),
        stop=tuple(stops),
        pins=pins_of(body.kvflash_pin),
        constraint=_constraint(body),
        most_reasoning_tokens=_most_reasoning(body),
        tenant=caller.tenant(None),
        client=caller.client,
        conversation=conversation,
    )


def _sampling(body: MessagesBody) -> Sampling:
    top_p = in_range_or(1.0, "top_p", body.top_p, 0.0, 1.0)
    if top_p == 0:
        refuse("top_p", top_p, "a number above 0, at most 1")
    return Sampling(
        temperature=in_range_or(1.0, "temperature", body.temperature, 0.0, 1.0),
        top_k=in_range_or(0, "top_k", body.top_k, 0, 2**31 - 1),
        top_p=top_p,
    )


def _constraint(body: MessagesBody) -> Constraint | None:
    """By `output_config.format`, or as it was named before."""
    config = body.output_config
    form, where = body.output_format, "output_format"
    if config is not None and config.format is not None:
        form, where = config.format, "output_config.format"
    if form is None:
        return None
    if form.type != "json_schema":
        refuse(f"{where}.type", form.type, "'json_schema'")
    schema = bytes(form.schema)
    if not schema.startswith(b"{") or len(schema) > MAX_SCHEMA_BYTES:
        words = f"a JSON schema of at most {MAX_SCHEMA_BYTES} bytes"
        refuse(f"{where}.schema", cut(schema.decode(errors="replace")), words)
    return Constraint("json_schema", schema.decode(), f"{where}.schema")


def _most_reasoning(body: MessagesBody) -> int | None:
    """By a budget, or by the effort where there is none."""
    effort = None if body.output_config is None else body.output_config.effort
    most = most_tokens("output_config.effort", effort)
    tokens = None if body.thinking is None else body.thinking.budget_tokens
    return budget("thinking.budget_tokens", tokens, most)


VERSION_HEADER = b"anthropic-version"


class VersionedRoute(Route):
    """A route for those who send Anthropic's header; others do not see it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if all(name != VERSION_HEADER for name, _ in scope.get("headers", ())):
            return Match.NONE, {}
        return super().matches(scope)


class Anthropic:
    """See luceasync.server.family.Family."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.endpoints: Sequence[Endpoint] = (Messages(engine), CountTokens(engine))
        self.pages: Sequence[Route] = (
            VersionedRoute("/v1/models", self.models),
            VersionedRoute("/v1/models/{model:path}", self.model),
        )

    def error(self, failure: Failure) -> ErrorBody:
        return error_body(failure)

    async def models(self, request: HttpRequest) -> Response:
        require_ready(self._engine)
        card = self._engine.card
        data = [_model(card, name) for name in card.names]
        listed = {"data": data, "has_more": False, "first_id": card.name, "last_id": card.names[-1]}
        return json_response(listed)

    async def model(self, request: HttpRequest) -> Response:
        require_ready(self._engine)
        card, name = self._engine.card, request.path_params["model"]
        if not card.serves(name):
            raise unknown_model(name, card)
        return json_response(_model(card, name))


def _model(card: ModelCard, name: str) -> dict[str, object]:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}

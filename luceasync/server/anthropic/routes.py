"""The routes of Anthropic's API: messages, token counts, the list of models.

That list shares its path with OpenAI's; requests for it have the header `anthropic-version`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from luceasync.request import Engine, ModelCard, Request, Stream
from luceasync.server.anthropic.answer import (
    AnthropicAnswer,
    AnthropicError,
    AnthropicEvent,
    AnthropicEvents,
    AnthropicFold,
    check_model,
    error_body,
)
from luceasync.server.anthropic.body import CountBody, MessagesBody, prompt_of, request_of
from luceasync.server.failures import Failure
from luceasync.server.family import (
    SOME_MODEL,
    BodySpec,
    Endpoint,
    LookupCall,
    typed_answer,
)
from luceasync.server.fields import decode
from luceasync.server.http.auth import Caller
from luceasync.server.http.responses import SERVER_SENT, encode_event, json_response

VERSION_HEADER = b"anthropic-version"
COUNT_EXAMPLE = {"model": SOME_MODEL, "messages": [{"role": "user", "content": "Hello"}]}
EXAMPLE = {**COUNT_EXAMPLE, "max_tokens": 100}

_messages_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountBody)


class AnthropicModel(msgspec.Struct):
    id: str
    display_name: str
    created_at: str
    type: Literal["model"] = "model"


class AnthropicModels(msgspec.Struct):
    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: bool = False


class Anthropic:
    framing = SERVER_SENT

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.endpoints: Sequence[Endpoint] = (Messages(engine), CountTokens(engine))
        self.pages: Sequence[Route] = (
            VersionedRoute("/v1/models", self.models),
            VersionedRoute("/v1/models/{model:path}", self.model),
        )

    def error(self, failure: Failure) -> AnthropicError:
        return error_body(failure)

    @typed_answer(AnthropicModels)
    async def models(self, request: HttpRequest) -> Response:
        """The served model under each of its names."""
        self._engine.check_ready()
        card = self._engine.card
        data = [_model(card, name) for name in card.names]
        return json_response(AnthropicModels(data, card.name, card.names[-1]))

    @typed_answer(AnthropicModel)
    async def model(self, request: HttpRequest) -> Response:
        """The model of that name."""
        self._engine.check_ready()
        card, name = self._engine.card, request.path_params["model"]
        check_model(name, card)
        return json_response(_model(card, name))


def _model(card: ModelCard, name: str) -> AnthropicModel:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return AnthropicModel(name, name, created)


class VersionedRoute(Route):
    """A route that matches only with Anthropic's header."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if all(name != VERSION_HEADER for name, _ in scope.get("headers", ())):
            return Match.NONE, {}
        return super().matches(scope)


class Messages:
    """Answer a conversation in Anthropic's form."""

    path = "/v1/messages"
    body = BodySpec(MessagesBody, AnthropicAnswer, AnthropicError, AnthropicEvent, EXAMPLE)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> MessageCall:
        card = self._engine.card
        parsed = decode(_messages_decoder, body)
        check_model(parsed.model, card)
        request = request_of(parsed, caller, headers)
        return MessageCall(request, bool(parsed.stream), card.name)


@dataclass(frozen=True, slots=True)
class MessageCall:
    request: Request
    stream: bool
    model: str

    @property
    def requests(self) -> Sequence[Request]:
        return (self.request,)

    def events(self, streams: Sequence[Stream]) -> AsyncGenerator[AnthropicEvent, None]:
        [stream] = streams
        return AnthropicEvents(self.model, stream.num_prompt_tokens).events(stream)

    def encode(self, event: AnthropicEvent) -> bytes:
        return encode_event(event, event.type)

    def end(self, failure: Failure | None) -> bytes:
        return b"" if failure is None else encode_event(error_body(failure), "error")

    async def fold(self, events: AsyncIterator[AnthropicEvent]) -> AnthropicAnswer:
        fold = AnthropicFold()
        async for event in events:
            fold.take(event)
        return fold.answer


class TokenCount(msgspec.Struct):
    """The number of tokens of a prompt."""

    input_tokens: int


class CountTokens:
    """Count the tokens of a conversation's prompt."""

    path = "/v1/messages/count_tokens"
    body = BodySpec(CountBody, TokenCount, AnthropicError, example=COUNT_EXAMPLE)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> LookupCall:
        parsed = decode(_count_decoder, body)
        check_model(parsed.model, self._engine.card)
        request = Request(prompt_of(parsed), tenant=caller.tenant(None))

        async def count() -> TokenCount:
            return TokenCount(len(await self._engine.tokens(request)))

        return LookupCall(count)

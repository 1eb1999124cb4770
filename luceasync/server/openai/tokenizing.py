"""POST /tokenize and /detokenize, GET /tokenizer_info: what a prompt is to the model.

Their form is the one that evaluation harnesses know from other servers. Owns it, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt, Engine, Request, TextPrompt
from luceasync.server.answering import require_ready
from luceasync.server.family import Form, Lookup
from luceasync.server.fields import at_most, decode
from luceasync.server.http.auth import Caller
from luceasync.server.openai.chat_body import Message, messages_of
from luceasync.server.status_pages import json_response

MAX_IDS = 1 << 20


class TokenizeBody(msgspec.Struct):
    """A `prompt`, or a chat; nothing is ever added to a prompt, whatever `add_special_tokens`."""

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]


class Text(msgspec.Struct):
    """What tokens say; part of a character is U+FFFD."""

    prompt: str


class Tokens(msgspec.Struct, omit_defaults=True):
    """`token_strs` where they were asked for; part of a character is U+FFFD."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None = None


_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


class Tokenize:
    """See luceasync.server.family.Endpoint."""

    path = "/tokenize"
    form = Form(TokenizeBody)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> Lookup:
        asked, engine = decode(_tokenize, body), self._engine
        request = Request(_prompt(asked), tenant=caller.tenant(None))

        async def look() -> Tokens:
            ids = await engine.tokens(request)
            told = Tokens(len(ids), engine.card.max_ctx_tokens, ids)
            if asked.return_token_strs:
                told.token_strs = await asyncio.to_thread(_each, engine, ids)
            return told

        return Lookup(look)


class Detokenize:
    """See luceasync.server.family.Endpoint."""

    path = "/detokenize"
    form = Form(DetokenizeBody)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> Lookup:
        asked = decode(_detokenize, body)
        at_most("tokens", asked.tokens, MAX_IDS, "tokens")

        async def look() -> Text:
            spelled = await asyncio.to_thread(self._engine.spelled, asked.tokens, "tokens")
            return Text(spelled.decode(errors="replace"))

        return Lookup(look)


class TokenizerPages:
    """What of the tokenizer a client may need to know."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def routes(self) -> list[Route]:
        return [Route("/tokenizer_info", self.info)]

    async def info(self, request: HttpRequest) -> Response:
        require_ready(self._engine)
        card = self._engine.card
        return json_response(dict(card.special_tokens) | {"chat_template": card.chat_template})


def _each(engine: Engine, ids: Sequence[int]) -> list[str]:
    return [engine.spelled([i], "tokens").decode(errors="replace") for i in ids]


def _prompt(body: TokenizeBody) -> TextPrompt | ChatPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Either 'prompt' or 'messages' is expected.", param="prompt")
    if body.messages is None:
        return TextPrompt(body.prompt or "")
    kwargs = body.chat_template_kwargs or {}
    return ChatPrompt(messages_of(body.messages), body.tools or None, kwargs)

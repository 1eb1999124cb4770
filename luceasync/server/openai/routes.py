"""The routes of OpenAI's API, including those that generate nothing: models and the tokenizer.

The tokenizer's routes have the form of vLLM's, which evaluation harnesses expect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from luceasync.errors import RequestError
from luceasync.request import ChatPrompt, Engine, ModelCard, Request, TextPrompt
from luceasync.server.failures import Failure
from luceasync.server.family import BodySpec, Endpoint, LookupCall, typed_answer
from luceasync.server.fields import at_most, decode, refuse
from luceasync.server.http.auth import Caller
from luceasync.server.http.responses import SERVER_SENT, json_response
from luceasync.server.openai.chat_answer import ChatCompletions
from luceasync.server.openai.chat_body import MAX_MESSAGES, ChatMessage, messages_of
from luceasync.server.openai.common import OpenAiError, check_model, error_body
from luceasync.server.openai.completions import Completions
from luceasync.server.openai.native import Infill, NativeCompletion
from luceasync.server.openai.responses_answer import Responses

MAX_IDS = 1 << 20


class OpenAi:
    framing = SERVER_SENT

    def __init__(self, engine: Engine) -> None:
        self.endpoints: Sequence[Endpoint] = (
            ChatCompletions(engine),
            Completions(engine),
            Responses(engine),
            Infill(engine),
            NativeCompletion(engine),
            Tokenize(engine),
            Detokenize(engine),
        )
        self.pages: Sequence[Route] = [*ModelPages(engine).routes, *TokenizerPages(engine).routes]

    def error(self, failure: Failure) -> OpenAiError:
        return error_body(failure)


class ModelMeta(msgspec.Struct):
    """Fields that OpenAI's API does not have; `thinks`: reasoning is separated from answers."""

    family: str
    num_parameters: int
    tool_format: str | None
    tools_in_system_message: bool
    takes_chats: bool
    thinks: bool


class OpenAiModel(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    meta: ModelMeta
    object: Literal["model"] = "model"
    owned_by: str = "luceasync"


class OpenAiModels(msgspec.Struct):
    data: list[OpenAiModel]
    object: Literal["list"] = "list"


class ModelPages:
    """GET /v1/models: the served model, under each of its names."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
        ]

    @typed_answer(OpenAiModels)
    async def models(self, request: HttpRequest) -> Response:
        """The served model under each of its names."""
        self._engine.check_ready()
        card = self._engine.card
        return json_response(OpenAiModels([_model(card, name) for name in card.names]))

    @typed_answer(OpenAiModel)
    async def model(self, request: HttpRequest) -> Response:
        """The model of that name."""
        self._engine.check_ready()
        card, name = self._engine.card, request.path_params["model"]
        check_model(name, card)
        return json_response(_model(card, name))


def _model(card: ModelCard, name: str) -> OpenAiModel:
    meta = ModelMeta(
        family=card.family,
        num_parameters=card.num_parameters,
        tool_format=card.tool_format or None,
        tools_in_system_message=card.tells_tools,
        takes_chats=card.takes_chats,
        thinks=card.thinks,
    )
    return OpenAiModel(name, card.created, card.max_ctx_tokens, meta)


class TokenizeBody(msgspec.Struct):
    """A `prompt` or a chat.

    No special tokens are added to a prompt, whatever `add_special_tokens` says.
    """

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]


class DetokenizedText(msgspec.Struct):
    """The text of tokens; an incomplete character is U+FFFD."""

    prompt: str


class TokenizedPrompt(msgspec.Struct, omit_defaults=True):
    """`token_strs` if requested; an incomplete character is U+FFFD."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None = None


_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


class Tokenize:
    """The tokens of a text or of a chat, which is rendered first."""

    path = "/tokenize"
    body = BodySpec(
        TokenizeBody,
        TokenizedPrompt,
        OpenAiError,
        example={"prompt": "Hello", "return_token_strs": True},
    )

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> LookupCall:
        parsed, engine = decode(_tokenize, body), self._engine
        request = Request(_prompt(parsed), tenant=caller.tenant(None))

        async def look_up() -> TokenizedPrompt:
            ids = await engine.tokens(request)
            answer = TokenizedPrompt(len(ids), engine.card.max_ctx_tokens, ids)
            if parsed.return_token_strs:
                answer.token_strs = await asyncio.to_thread(_each, engine, ids)
            return answer

        return LookupCall(look_up)


class Detokenize:
    """The text of tokens."""

    path = "/detokenize"
    body = BodySpec(DetokenizeBody, DetokenizedText, OpenAiError, example={"tokens": [1, 2, 3]})

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> LookupCall:
        parsed = decode(_detokenize, body)
        at_most("tokens", parsed.tokens, MAX_IDS, "tokens")

        async def look_up() -> DetokenizedText:
            text = await asyncio.to_thread(self._engine.token_bytes, parsed.tokens, "tokens")
            return DetokenizedText(text.decode(errors="replace"))

        return LookupCall(look_up)


class TokenizerPages:
    """GET /tokenizer_info: special tokens and the chat template."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def routes(self) -> list[Route]:
        return [Route("/tokenizer_info", self.info)]

    @typed_answer(dict[str, str])
    async def info(self, request: HttpRequest) -> Response:
        """Special tokens by name, and the chat template."""
        self._engine.check_ready()
        card = self._engine.card
        return json_response(dict(card.special_tokens) | {"chat_template": card.chat_template})


def _each(engine: Engine, ids: Sequence[int]) -> list[str]:
    return [engine.token_bytes([i], "tokens").decode(errors="replace") for i in ids]


def _prompt(body: TokenizeBody) -> TextPrompt | ChatPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Expected either 'prompt' or 'messages'.", param="prompt")
    if body.messages is None:
        return TextPrompt(body.prompt or "")
    if not body.messages:
        refuse("messages", [], "at least one message")
    at_most("messages", body.messages, MAX_MESSAGES, "messages")
    kwargs = body.chat_template_kwargs or {}
    return ChatPrompt(messages_of(body.messages), body.tools or None, kwargs)

"""The routes of Ollama's API: chat, generate, and those that describe the model.

One model is served, so nothing is pulled, created or deleted here; the routes for that return an
error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from luceasync import __version__
from luceasync.errors import RequestError
from luceasync.request import Engine, ModelCard
from luceasync.server.failures import Failure
from luceasync.server.family import (
    SOME_MODEL,
    BodySpec,
    Call,
    Endpoint,
    LookupCall,
    typed_answer,
)
from luceasync.server.fields import decode
from luceasync.server.http.auth import Caller
from luceasync.server.http.responses import JSON_LINES, json_response
from luceasync.server.ollama.answer import (
    AnsweredMessage,
    ChatLine,
    GenerateLine,
    Line,
    LinesCall,
    OllamaError,
    error_body,
    timestamp,
)
from luceasync.server.ollama.body import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    chat_prompt,
    check_model,
    generate_prompt,
    refuse_unserved,
    request_of,
)

# Clients check whether the server is new enough for thinking, tools and log-probabilities.
API_VERSION = "0.13.0"
NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded
ONE_MODEL = "this server serves the one model that it was started with"
NO_EMBEDDINGS = "this server generates text and computes no embeddings"
# Methods of the refused routes, and reasons.
REFUSED: Mapping[str, tuple[str, str]] = {
    "/api/pull": ("POST", ONE_MODEL),
    "/api/push": ("POST", ONE_MODEL),
    "/api/create": ("POST", ONE_MODEL),
    "/api/copy": ("POST", ONE_MODEL),
    "/api/delete": ("DELETE", ONE_MODEL),
    "/api/embed": ("POST", NO_EMBEDDINGS),
    "/api/embeddings": ("POST", NO_EMBEDDINGS),
}


class Ollama:
    framing = JSON_LINES

    def __init__(self, engine: Engine) -> None:
        self.endpoints: Sequence[Endpoint] = (Chat(engine), Generate(engine), Show(engine))
        self.pages: Sequence[Route] = (
            *OllamaPages(engine).routes,
            *(Route(path, refused, methods=[method]) for path, (method, _) in REFUSED.items()),
        )

    def error(self, failure: Failure) -> OllamaError:
        return error_body(failure)


@typed_answer(OllamaError)
async def refused(request: HttpRequest) -> Response:
    """Not served; the error gives the reason."""
    path = request.url.path
    raise RequestError(f"{path} is not served: {REFUSED[path][1]}", code="not_served")


_chat_decoder = msgspec.json.Decoder(OllamaChatBody)
_generate_decoder = msgspec.json.Decoder(OllamaGenerateBody)


class Chat:
    """Answer a conversation in Ollama's form."""

    path = "/api/chat"
    body = BodySpec(
        OllamaChatBody,
        ChatLine,
        OllamaError,
        ChatLine,
        {"model": SOME_MODEL, "messages": [{"role": "user", "content": "Hello"}]},
    )

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> Call[Any]:
        card, parsed = self._engine.card, decode(_chat_decoder, body)
        check_model(parsed.model, card)
        if not parsed.messages:
            return loaded(parsed, ChatLine)
        request = request_of(parsed, chat_prompt(parsed, card), card, caller, headers)
        return LinesCall(request, parsed.model, ChatLine, stream=parsed.stream is not False)


class Generate:
    """Continue a prompt in Ollama's form: through the chat template, or `raw`."""

    path = "/api/generate"
    body = BodySpec(
        OllamaGenerateBody,
        GenerateLine,
        OllamaError,
        GenerateLine,
        {"model": SOME_MODEL, "prompt": "Hello", "options": {"num_predict": 100}},
    )

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> Call[Any]:
        card, parsed = self._engine.card, decode(_generate_decoder, body)
        check_model(parsed.model, card)
        if not parsed.prompt and not parsed.suffix:
            return loaded(parsed, GenerateLine)
        request = request_of(parsed, generate_prompt(parsed, card), card, caller, headers)
        return LinesCall(request, parsed.model, GenerateLine, stream=parsed.stream is not False)


def loaded(body: OllamaBody, line: type[Line]) -> LookupCall:
    """The answer to a body without a prompt, a request to load or unload the model: it stays
    loaded.
    """
    refuse_unserved(body)

    async def tell() -> Line:
        answer = line.of(body.model, AnsweredMessage())
        answer.done, answer.done_reason = True, "load"
        return answer

    return LookupCall(tell)


# What is served


class OllamaDetails(msgspec.Struct):
    """`parameter_size` is the number of parameters in the usual short form."""

    family: str
    families: list[str]
    parameter_size: str
    format: str = ""
    parent_model: str = ""
    quantization_level: str = ""


class ListedModel(msgspec.Struct):
    """`size`: bytes of weights and lanes. `digest`: of name, family, size and chat template."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class RunningModel(msgspec.Struct):
    """`size_vram`: the part of `size` that is not on CPUs."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class ListedModels(msgspec.Struct):
    models: list[ListedModel]


class RunningModels(msgspec.Struct):
    models: list[RunningModel]


class OllamaVersion(msgspec.Struct):
    """`version` is that of Ollama, whose API this is; `luceasync` that of this server."""

    version: str
    luceasync: str


class ShowBody(msgspec.Struct):
    """The fields of `POST /api/show` that are read; `name` is the older one."""

    model: str | None = None
    name: str | None = None


class ShownModel(msgspec.Struct):
    """`template`: the chat template's source, in Jinja."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


_show_decoder = msgspec.json.Decoder(ShowBody)


class Show:
    """Describe the model: context, template and capabilities."""

    path = "/api/show"
    body = BodySpec(ShowBody, ShownModel, OllamaError, example={"model": SOME_MODEL})

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def parse(self, body: bytes, headers: Headers, caller: Caller) -> LookupCall:
        card, parsed = self._engine.card, decode(_show_decoder, body)
        check_model(parsed.model or parsed.name, card)

        async def look_up() -> ShownModel:
            return ShownModel(
                modelfile=f"FROM {card.name}",
                parameters="",
                template=card.chat_template,
                details=_details(card),
                model_info={
                    "general.architecture": card.family,
                    "general.basename": card.name,
                    "general.parameter_count": card.num_parameters,
                    f"{card.family}.context_length": card.max_ctx_tokens,
                },
                capabilities=_capabilities(card),
                modified_at=timestamp(card.created),
            )

        return LookupCall(look_up)


class OllamaPages:
    """The routes that take GET requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/api/tags", self.tags),
            Route("/api/ps", self.ps),
            Route("/api/version", self.version),
        ]

    @typed_answer(ListedModels)
    async def tags(self, request: HttpRequest) -> Response:
        """The served model under each of its names, in Ollama's form."""
        self._engine.check_ready()
        card, details = self._engine.card, await self._engine.details()
        num_bytes = sum((details.device_bytes or {}).values())
        made = timestamp(card.created)
        models = [
            ListedModel(name, name, made, num_bytes, _digest(card), _details(card))
            for name in card.names
        ]
        return json_response(ListedModels(models))

    @typed_answer(RunningModels)
    async def ps(self, request: HttpRequest) -> Response:
        """The model that is loaded, and the memory that it takes."""
        self._engine.check_ready()
        card, details = self._engine.card, await self._engine.details()
        model = RunningModel(
            card.name,
            card.name,
            sum((details.device_bytes or {}).values()),
            _digest(card),
            _details(card),
            NEVER,
            details.gpu_bytes,
            card.max_ctx_tokens,
        )
        return json_response(RunningModels([model]))

    @typed_answer(OllamaVersion)
    async def version(self, request: HttpRequest) -> Response:
        """The version of Ollama whose API this is, and the server's own."""
        return json_response(OllamaVersion(API_VERSION, __version__))


def _capabilities(card: ModelCard) -> list[str]:
    can = {
        "completion": True,
        "tools": bool(card.tool_format),
        "thinking": card.can_think,
        "insert": card.fills_in,
    }
    return [name for name, is_there in can.items() if is_there]


def _details(card: ModelCard) -> OllamaDetails:
    return OllamaDetails(card.family, [card.family], _size_text(card.num_parameters))


def _size_text(num_parameters: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if num_parameters >= unit:
            return f"{num_parameters / unit:.1f}{name}"
    return str(num_parameters)


def _digest(card: ModelCard) -> str:
    """A digest that distinguishes models; nothing is looked up by it."""
    told = f"{card.name}\0{card.family}\0{card.num_parameters}\0{card.chat_template}"
    return hashlib.sha256(told.encode()).hexdigest()

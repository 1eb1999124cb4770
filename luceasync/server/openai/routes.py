"""The routes of OpenAI's API, its list of models, and the form of its errors."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from luceasync.request import Engine, ModelCard
from luceasync.server.failures import Failure
from luceasync.server.family import Endpoint, require_ready
from luceasync.server.http.responses import json_response
from luceasync.server.openai.chat_answer import ChatCompletions
from luceasync.server.openai.common import OpenAiError, check_model, error_body
from luceasync.server.openai.completions import Completions
from luceasync.server.openai.responses_answer import Responses
from luceasync.server.openai.tokenizing import Detokenize, Tokenize, TokenizerPages


class OpenAi:
    def __init__(self, engine: Engine) -> None:
        self.endpoints: Sequence[Endpoint] = (
            ChatCompletions(engine),
            Completions(engine),
            Responses(engine),
            Tokenize(engine),
            Detokenize(engine),
        )
        self.pages: Sequence[Route] = [*ModelPages(engine).routes, *TokenizerPages(engine).routes]

    def error(self, failure: Failure) -> OpenAiError:
        return error_body(failure)


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

    async def models(self, request: Request) -> Response:
        require_ready(self._engine)
        card = self._engine.card
        return json_response(
            {"object": "list", "data": [_model(card, name) for name in card.names]}
        )

    async def model(self, request: Request) -> Response:
        require_ready(self._engine)
        card, name = self._engine.card, request.path_params["model"]
        check_model(name, card)
        return json_response(_model(card, name))


def _model(card: ModelCard, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "luceasync",
        "max_model_len": card.max_ctx_tokens,
        "meta": {
            "family": card.family,
            "num_parameters": card.num_parameters,
            "tool_format": card.tool_format or None,
            "thinks": card.thinks,
        },
    }

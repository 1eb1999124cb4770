"""Which routes OpenAI's API has here, and how it tells a failure.

Owns the list. Knows nothing of what an endpoint does.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from luceasync.request import Engine, ModelCard
from luceasync.server.answering import require_ready
from luceasync.server.failures import Failure
from luceasync.server.family import Endpoint
from luceasync.server.openai.chat_answer import ChatCompletions
from luceasync.server.openai.common import ErrorBody, error_body, unknown_model
from luceasync.server.openai.completions import Completions
from luceasync.server.openai.responses_answer import Responses
from luceasync.server.openai.tokenizing import Detokenize, Tokenize, TokenizerPages
from luceasync.server.status_pages import json_response

# GET /v1/models: the one model that is served, under each of its names. Owns its shape. Knows
# nothing of how it is served.


class ModelPages:
    """The list, and the model by a name of it."""

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
        if not card.serves(name):
            raise unknown_model(name, card)
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


class OpenAi:
    """See luceasync.server.family.Family."""

    def __init__(self, engine: Engine) -> None:
        self.endpoints: Sequence[Endpoint] = (
            ChatCompletions(engine),
            Completions(engine),
            Responses(engine),
            Tokenize(engine),
            Detokenize(engine),
        )
        self.pages: Sequence[Route] = [*ModelPages(engine).routes, *TokenizerPages(engine).routes]

    def error(self, failure: Failure) -> ErrorBody:
        return error_body(failure)

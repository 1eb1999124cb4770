"""Which routes Anthropic's API has here, and how it tells a failure.

Owns the list. The model list shares its path with another API's: the header says whose is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from luceasync.request import Engine, ModelCard
from luceasync.server.answering import require_ready
from luceasync.server.anthropic.messages import CountTokens, Messages
from luceasync.server.anthropic.shapes import ErrorBody, error_body, unknown_model
from luceasync.server.failures import Failure
from luceasync.server.family import Endpoint
from luceasync.server.status_pages import json_response

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

    async def models(self, request: Request) -> Response:
        require_ready(self._engine)
        card = self._engine.card
        data = [_model(card, name) for name in card.names]
        listed = {"data": data, "has_more": False, "first_id": card.name, "last_id": card.names[-1]}
        return json_response(listed)

    async def model(self, request: Request) -> Response:
        require_ready(self._engine)
        card, name = self._engine.card, request.path_params["model"]
        if not card.serves(name):
            raise unknown_model(name, card)
        return json_response(_model(card, name))


def _model(card: ModelCard, name: str) -> dict[str, object]:
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}

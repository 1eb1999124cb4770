"""Failures as responses, each in the words of the family whose route was asked for.

Owns which family that is. Knows no error object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from luceasync.server.failures import describe
from luceasync.server.family import Family
from luceasync.server.request_log import note_of


class TellUnforeseen:
    """Middleware: what nobody foresaw becomes an answer here, so that what is around it adds the
    headers of any other one; the exception goes on to whoever logs it.
    """

    def __init__(self, app: ASGIApp, refusal: Callable[[Scope, Exception], Response]) -> None:
        self._app = app
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if scope["type"] == "http" and note_of(scope).status is None:
                await self._refusal(scope, error)(scope, receive, send)
            raise


class Refusals:
    """Knows the routes of every family; what none of them has is told by the first."""

    def __init__(self, routes: Sequence[tuple[Family, Sequence[Route]]]) -> None:
        self._routes = routes

    def response(self, scope: Scope, error: Exception) -> Response:
        """The answer to a request that failed before anything of one was sent."""
        failure = describe(error)
        return Response(
            msgspec.json.encode(self._family_of(scope).error(failure)),
            status_code=failure.status,
            headers=failure.headers,
            media_type="application/json",
        )

    async def handle(self, request: Request, error: Exception) -> Response:
        """`response`, as Starlette calls its exception handlers."""
        return self.response(request.scope, error)

    def _family_of(self, scope: Scope) -> Family:
        for family, routes in reversed(self._routes):
            if any(route.matches(scope)[0] is not Match.NONE for route in routes):
                return family
        return self._routes[0][0]

"""The ASGI app: the server's own routes and those of each API family, middleware, lifespan.

Owns what is reachable under which path. Knows nothing of sockets, signals or the engine's inside,
nor of what a family says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from luceasync.config import ServerConfig
from luceasync.errors import LuceasyncError
from luceasync.request import Engine
from luceasync.server.answering import Answering, House
from luceasync.server.anthropic.routes import Anthropic
from luceasync.server.drain import Drain
from luceasync.server.failures import describe
from luceasync.server.family import Family, MakeFamily
from luceasync.server.http.auth import RequireApiKey
from luceasync.server.http.origins import guards
from luceasync.server.malloc_trim import give_back_what_was_freed
from luceasync.server.metrics import Metrics
from luceasync.server.openai.routes import OpenAi
from luceasync.server.request_log import LogRequests, note_of
from luceasync.server.status_pages import CacheAdmin, Live, StatusPages
from luceasync.server.web.openapi import OpenApi

# Failures as responses, each in the words of the family whose route was asked for. Owns which
# family that is. Knows no error object.


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


# The first of them tells what goes wrong on no family's route. Where two have a path, a later one
# is asked first: it says in its route which requests are its own.
FAMILIES: tuple[MakeFamily, ...] = (OpenAi, Anthropic)


def create_app(
    engine: Engine,
    config: ServerConfig,
    *,
    trust_cache_salt: bool = False,
    families: Sequence[MakeFamily] = FAMILIES,
) -> Starlette:
    """Build the app around `engine`; its Drain is `app.state.drain`, for whoever shuts it down.

    `trust_cache_salt`: a request's `cache_salt` narrows what it shares; else it is refused.
    """
    drain, metrics = Drain(), Metrics(engine)
    house = House(engine, config, drain, metrics, trust_cache_salt)
    spoken = [(family, _routes(family, house)) for family in (make(engine) for make in families)]
    refusals = Refusals(spoken)
    middleware = [
        Middleware(LogRequests, refusal=refusals.response, count=metrics.count),
        *guards(config, refusals.response),
        Middleware(TellUnforeseen, refusal=refusals.response),
    ]
    if config.api_keys:
        keys = (*config.api_keys, *config.admin_keys)
        middleware.append(Middleware(RequireApiKey, keys=keys, refusal=refusals.response))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(metrics.watch_lag()),
                tasks.create_task(give_back_what_was_freed()),
            ]
            yield
            for task in beside:
                task.cancel()

    pages = [
        *StatusPages(engine, drain, metrics).routes,
        *house.running.routes,
        *Live(engine, drain).routes,
        *CacheAdmin(engine, config.admin_keys).routes,
    ]
    app = Starlette(
        routes=[
            *pages,
            *OpenApi([family for family, _ in spoken], pages).routes,
            *(route for _, routes in reversed(spoken) for route in routes),
        ],
        middleware=middleware,
        exception_handlers=dict.fromkeys(
            (HTTPException, LuceasyncError, Exception), refusals.handle
        ),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.drain = drain
    return app


def _routes(family: Family, house: House) -> list[Route]:
    endpoints = (
        Route(endpoint.path, Answering(endpoint, house), methods=["POST"])
        for endpoint in family.endpoints
    )
    return [*family.pages, *endpoints]

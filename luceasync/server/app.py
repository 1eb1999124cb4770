"""The ASGI app: routes of the server and of each API family, middleware, lifespan.

Independent of sockets, signals, the engine's internals and the families' bodies.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from luceasync.errors import LuceasyncError
from luceasync.request import Engine
from luceasync.server.answering import Answering, ServerContext
from luceasync.server.anthropic.routes import Anthropic
from luceasync.server.api_page import ApiPages
from luceasync.server.drain import Drain
from luceasync.server.failures import Failure, describe
from luceasync.server.family import ApiFamily, MakeFamily
from luceasync.server.http.auth import RequireApiKey
from luceasync.server.http.origins import origin_middleware
from luceasync.server.http.responses import json_response
from luceasync.server.malloc_trim import trim_periodically
from luceasync.server.metrics import Metrics
from luceasync.server.ollama.routes import Ollama
from luceasync.server.openai.routes import OpenAi
from luceasync.server.request_log import LogRequests, note_of
from luceasync.server.status_pages import CacheAdmin, StatusEvents, StatusPages
from luceasync.server_config import ServerConfig

OTHER_NAMES = {  # routes under the names that other servers use
    "/generate": "/v1/completions",
}
# The first family words the errors of routes that belong to no family. If two families share a
# path, the later one is tried first: its route checks whether a request is meant for it.
FAMILIES: tuple[MakeFamily, ...] = (OpenAi, Anthropic, Ollama)


def create_app(
    engine: Engine,
    config: ServerConfig,
    *,
    trust_cache_salt: bool = False,
    families: Sequence[MakeFamily] = FAMILIES,
) -> Starlette:
    """Build the app around `engine`. Its Drain is `app.state.drain`, for a graceful shutdown.

    `trust_cache_salt`: accept the field `cache_salt`, which narrows what a request shares with
    others.
    """
    drain, metrics = Drain(), Metrics(engine)
    context = ServerContext(engine, config, drain, metrics, trust_cache_salt)
    routed = [(family, _routes(family, context)) for family in (make(engine) for make in families)]
    refusals = Refusals(routed)
    pages = [
        *StatusPages(engine, drain, metrics).routes,
        *context.running.routes,
        *StatusEvents(engine, drain, metrics.recent).routes,
        *CacheAdmin(engine, config.admin_keys).routes,
    ]
    routes = [
        *pages,
        *ApiPages([family for family, _ in routed], pages).routes,
        *(route for _, routes in reversed(routed) for route in routes),
    ]
    app = Starlette(
        routes=routes,
        middleware=_middleware(config, routes, refusals, metrics),
        exception_handlers=dict.fromkeys(
            (HTTPException, LuceasyncError, Exception), refusals.handle
        ),
        lifespan=_lifespan(metrics),
    )
    app.router.redirect_slashes = False
    app.router.middleware_stack = RoutesByPath(app.router.middleware_stack, routes)
    app.state.drain = drain
    return app


def _routes(family: ApiFamily, context: ServerContext) -> list[Route]:
    endpoints = (
        Route(endpoint.path, Answering(endpoint, family.framing, context), methods=["POST"])
        for endpoint in family.endpoints
    )
    return [*family.pages, *endpoints]


class RoutesByPath:
    """Router middleware that finds routes without parameters by their path, since Starlette tries
    dozens of routes one after the other. Routes with the same path are tried in their order; a
    request that none of them matches is passed to `app`.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._routes: defaultdict[str, list[Route]] = defaultdict(list)
        for route in routes:
            if not route.param_convertors:
                self._routes[route.path].append(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for route in self._routes.get(scope["path"], ()):
                match, child_scope = route.matches(scope)
                if match is Match.FULL:
                    scope.update(child_scope, route=route)
                    await route.handle(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _middleware(
    config: ServerConfig, routes: Sequence[BaseRoute], refusals: Refusals, metrics: Metrics
) -> list[Middleware]:
    """The middleware, outermost first."""
    middleware = [
        Middleware(LogRequests, routes=routes, refusal=refusals.response, count=metrics.count),
        *origin_middleware(config, refusals.response),
        Middleware(AnswerUnexpectedErrors, refusal=refusals.response),
    ]
    if config.api_keys:
        keys = (*config.api_keys, *config.admin_keys)
        middleware.append(Middleware(RequireApiKey, keys=keys, refusal=refusals.response))
    return middleware


def _lifespan(metrics: Metrics) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(metrics.watch_lag()),
                tasks.create_task(trim_periodically()),
            ]
            yield
            for task in background:
                task.cancel()

    return lifespan


class Refusals:
    """Makes error responses in the form of the family that the requested route belongs to."""

    def __init__(self, routed: Sequence[tuple[ApiFamily, Sequence[Route]]]) -> None:
        self._routed = routed

    def response(self, scope: Scope, error: Exception) -> Response:
        """The response to a request that failed before any part of its answer was sent."""
        failure = describe(error)
        if isinstance(error, HTTPException) and failure.status == 404:
            failure = self._with_hint(failure, scope["path"])
        body = self._family_of(scope).error(failure)
        return json_response(body, failure.status, failure.headers)

    async def handle(self, request: Request, error: Exception) -> Response:
        """`response` as a Starlette exception handler."""
        return self.response(request.scope, error)

    def _with_hint(self, failure: Failure, path: str) -> Failure:
        """The failure with a hint to the route that was probably meant, if it is a 404."""
        paths = {route.path for _, routes in self._routed for route in routes}
        last = path.rstrip("/").rpartition("/v1")[2]
        guesses = (OTHER_NAMES.get(path, ""), path.rstrip("/"), f"/v1{last}", last)
        meant = next((guess for guess in guesses if guess in paths), None)
        if meant is None:
            return failure
        return replace(failure, message=f"{failure.message} Did you mean {meant}?")

    def _family_of(self, scope: Scope) -> ApiFamily:
        for family, routes in reversed(self._routed):
            if any(route.matches(scope)[0] is not Match.NONE for route in routes):
                return family
        return self._routed[0][0]


class AnswerUnexpectedErrors:
    """Middleware that answers unexpected exceptions inside CORS and the request log, so that these
    responses get the same headers as others, and re-raises the exceptions to be logged.
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

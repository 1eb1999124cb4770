"""The ASGI app: routes, lifespan, and every failure as an OpenAI error object.

Owns what is reachable under which path. Knows nothing of sockets, signals or the engine's inside.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from luceasync import __version__
from luceasync.config import ServerConfig
from luceasync.errors import LuceasyncError
from luceasync.request import Engine, ModelCard
from luceasync.server.auth import RequireApiKey
from luceasync.server.chat import ChatCompletions, require_ready
from luceasync.server.drain import Drain
from luceasync.server.failures import describe
from luceasync.server.metrics import CONTENT_TYPE, CountRequests, Metrics
from luceasync.server.schema import unknown_model


def create_app(
    engine: Engine, config: ServerConfig, *, trust_cache_salt: bool = False
) -> Starlette:
    """Build the app around `engine`; its Drain is `app.state.drain`, for whoever shuts it down.

    `trust_cache_salt`: a request's `cache_salt` narrows what it shares; else it is refused.
    """
    drain, metrics = Drain(), Metrics(engine)
    status = StatusPages(engine, drain, metrics)
    middleware = [Middleware(CountRequests, metrics=metrics)]
    if config.api_keys:
        middleware.append(Middleware(RequireApiKey, keys=config.api_keys))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            lag = tasks.create_task(metrics.watch_lag())
            yield
            lag.cancel()

    chat = ChatCompletions(engine, config, drain, metrics, trust_cache_salt)
    app = Starlette(
        routes=[
            Route("/", status.root),
            Route("/health", status.health),
            Route("/ready", status.ready),
            Route("/metrics", status.metrics),
            Route("/v1/models", status.models),
            Route("/v1/models/{model:path}", status.model),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={
            HTTPException: _tell,
            LuceasyncError: _tell,
            Exception: _tell,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.drain = drain
    return app


class StatusPages:
    """The GET routes: what is served, and how it is."""

    def __init__(self, engine: Engine, drain: Drain, metrics: Metrics) -> None:
        self._engine = engine
        self._drain = drain
        self._metrics = metrics

    async def root(self, request: Request) -> Response:
        return _json({"name": "luceasync", "version": __version__})

    async def health(self, request: Request) -> Response:
        """Live: the process answers, whether or not the model is loaded. Degraded: it serves, but
        a fault of the disk keeps prefixes from being kept.
        """
        status = self._engine.status()
        if status.cache is not None and status.cache.degraded:
            return _json({"status": "degraded", "detail": status.cache.degraded})
        return _json({"status": "ok", "detail": status.detail})

    async def ready(self, request: Request) -> Response:
        """503 while the model loads and from the moment the server shuts down."""
        status = self._engine.status()
        ready = status.ready and not self._drain.closing
        detail = "shutting down" if self._drain.closing else status.detail
        return _json({"ready": ready, "detail": detail}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        require_ready(self._engine)
        return _json({"object": "list", "data": [_model(self._engine.card)]})

    async def model(self, request: Request) -> Response:
        require_ready(self._engine)
        name = request.path_params["model"]
        if name != self._engine.card.name:
            raise unknown_model(name)
        return _json(_model(self._engine.card))


def _model(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "luceasync",
        "max_model_len": card.max_ctx_tokens,
        "meta": {"family": card.family, "num_parameters": card.num_parameters},
    }


def _json(payload: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(payload), status, media_type="application/json")


async def _tell(request: Request, error: Exception) -> Response:
    return describe(error).response()
